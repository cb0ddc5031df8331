"""What the config.json of a folder describes; no torch here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from mt_files import open_file, read_json, writing

from mt_model.hugging_face.error import ExchangeError
from mt_model.hugging_face.family import Family
from mt_model.hugging_face.registry import family_of
from mt_model.stack_config import StackConfig

CONFIG = "config.json"
# What stands beside the weights and says nothing of them.
CARRIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)
ONE_FILE, INDEX = _WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model")
_MAX_JSON = 1 << 26
_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Description:
    """A model as the config.json of a folder describes it.

    Attributes:
        folder: The folder.
        family: Of the model.
        config: The model.
        given: The content of config.json.
    """

    folder: Path
    family: Family
    config: StackConfig
    given: Mapping[str, Any]

    @property
    def tokenizer(self) -> Path | None:
        """Its tokenizer, as one file; None where there is none."""
        return next(
            (path for path in map(self.folder.joinpath, _TOKENIZERS) if path.exists()), None
        )

    @property
    def eos_token(self) -> str | None:
        """What tokenizer_config.json calls the end of a text, if it does.

        Raises:
            FileError: The file can't be read.
        """
        path = self.folder / "tokenizer_config.json"
        if not path.exists():
            return None
        given: Any = read_json(path, limit=_MAX_JSON, within=root_of(self.folder))
        token = given.get("eos_token") if isinstance(given, Mapping) else None
        token = token.get("content") if isinstance(token, Mapping) else token
        return token if isinstance(token, str) else None

    def copy_to(self, folder: Path) -> None:
        """Copy everything but the weights into a folder.

        Raises:
            FileError: A file can't be read or written.
        """
        for name in (CONFIG, *CARRIED):
            if (self.folder / name).exists():
                copy_into(self.folder / name, folder)


def describe_pretrained(folder: str | Path) -> Description:
    """Read the config.json of a folder, and of its tensors at most what they are called.

    Args:
        folder: Of Hugging Face transformers, or a snapshot in the hub's cache.

    Raises:
        ExchangeError: The architecture or a field is not known; the message names it.
        FileError: The file can't be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ExchangeError(f"{folder} is not a folder; name one with {CONFIG} and safetensors")
    given = read_config(folder)
    family = family_of(given, folder / CONFIG)
    config = family.config_of(unquantized(given), folder / CONFIG, _names(family, folder))
    return Description(folder=folder, family=family, config=config, given=given)


def _names(family: Family, folder: Path) -> Collection[str] | None:
    """Return the names of the folder's tensors, for a family that asks for them."""
    if family.settle is None or not any((folder / name).exists() for name in _WEIGHTS):
        return None
    return import_module("mt_model.hugging_face.tensors").open_tensors(folder)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json.

    Raises:
        ExchangeError: It is no mapping.
        FileError: It can't be read.
    """
    path = folder / CONFIG
    given = read_json(path, limit=_MAX_JSON, within=root_of(folder))
    if not isinstance(given, dict):
        raise ExchangeError(f"{path}: is no mapping of fields; restore it")
    return given


def unquantized(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a config.json without how its weights are stored."""
    return {name: value for name, value in given.items() if name != "quantization_config"}


def root_of(folder: Path) -> Path:
    """Return the folder that links may not lead out of.

    A snapshot in the cache of the Hugging Face hub is links into the folder of its model.
    """
    real = folder.resolve()
    return real.parents[1] if real.parent.name == "snapshots" else real


def copy_into(path: Path, folder: Path) -> None:
    """Copy a file of a folder of Hugging Face into another folder, under the same name."""
    with (
        open_file(path, within=root_of(path.parent)) as source,
        writing(folder / path.name) as target,
    ):
        while block := source.read(_BLOCK):
            target.write(block)
