"""The digest of weights that adapters name as their base."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mt_hf.family.error import ExchangeError
from mt_hf.reading.files import CONFIG

_MANIFEST = "zarr.json"
_BLOCK = 1 << 24


def base_digest(folder: Path) -> str:
    """Return the SHA-256 of the weights of a folder, in hexadecimal.

    A step directory is known by its manifest, which has the digests of its arrays; a folder of
    Hugging Face is read in full.

    Args:
        folder: A step directory, or a folder with config.json and safetensors files.

    Raises:
        ExchangeError: There are no such files, or one can't be read.
    """
    manifest = folder / _MANIFEST
    paths = [manifest] if manifest.is_file() else sorted(folder.glob("*.safetensors"))
    if manifest not in paths and not ((folder / CONFIG).is_file() and paths):
        raise ExchangeError(
            f"{folder} has no weights to adapt: neither a {_MANIFEST} of a step nor a {CONFIG} "
            "with safetensors files; restore the base of the adapters"
        )
    digest = hashlib.sha256()
    try:
        for path in [*([] if manifest in paths else [folder / CONFIG]), *paths]:
            digest.update(f"{path.name}:{path.stat().st_size}:".encode())
            with path.open("rb") as file:
                while block := file.read(_BLOCK):
                    digest.update(block)
    except OSError as error:
        raise ExchangeError(f"{folder}: {error.strerror or error}; restore the file") from error
    return digest.hexdigest()
