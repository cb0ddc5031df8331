"""Ids of the Hugging Face hub where a folder is expected."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from mt_files import read_text, shorten

from mt_hf.family.error import ExchangeError
from mt_hf.reading.files import CARRIED, CONFIG, INDEX

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_COMMIT = re.compile(r"[0-9A-Za-z]{1,64}")
_NEEDS = "pip install huggingface_hub"  # the extra mt-hf[hub]


def is_hub_id(text: str) -> bool:
    """Return whether a text has the form of an id of the hub, such as `Qwen/Qwen3-0.6B`."""
    return _ID.fullmatch(text) is not None


def find_folder(named: str | Path, *, base: str | Path = ".", download: bool = False) -> Path:
    """Return the folder that a path or an id of the hub names.

    With huggingface_hub installed, an id such as `Qwen/Qwen3-0.6B` means the newest downloaded
    revision of its branch `main` in the local cache. The hub is asked only if `download` is set.

    Args:
        named: A path, or an id of the hub; a folder of that name comes first.
        base: Folder that a relative path is against.
        download: Whether to download what the cache lacks.

    Raises:
        ExchangeError: There is no such folder, and the id is not in the cache or can't be
            downloaded; the message says how to get it.
    """
    path, text = Path(base) / named, str(named)
    if path.is_dir():
        return path
    if path.exists() or not is_hub_id(text):
        raise ExchangeError(
            f"{_shown(path)} is not a folder; name one with {CONFIG} and safetensors, "
            "or a model of the Hugging Face hub, such as Qwen/Qwen3-0.6B"
        )
    if find_spec("huggingface_hub") is None:
        raise ExchangeError(
            f"{text} is not a folder; to read it as a model of the Hugging Face hub: {_NEEDS}"
        )
    return _downloaded(text) if download else _cached(text)


def _shown(path: Path) -> str:
    return shorten(str(path), 200).strip("'\"")


def _cached(name: str) -> Path:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    own = cache / f"models--{name.replace('/', '--')}"
    reference = own / "refs" / "main"
    if reference.exists():
        commit = read_text(reference, limit=256, within=own).strip()
        if _COMMIT.fullmatch(commit) and (found := own / "snapshots" / commit).is_dir():
            return found
    raise ExchangeError(
        f"{name} is neither a folder nor in the cache of the Hugging Face hub, {cache}; download "
        f"it with: hf download {name} (or with --download); without a network, copy the folder "
        "of the model here and name that"
    )


def _downloaded(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    files = [CONFIG, INDEX, "*.safetensors", "hf_quant_config.json", *CARRIED]
    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except (HfHubHTTPError, OSError, ValueError) as error:
        why = " ".join(str(error).split())[:300]
        raise ExchangeError(
            f"{name} can't be downloaded from the Hugging Face hub: {why or type(error).__name__}; "
            f"where there is a network: hf download {name}"
        ) from error
