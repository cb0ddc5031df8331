"""The digest of weights that adapters name as their base."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from mt_hf.family.error import ExchangeError
from mt_hf.reading.files import CONFIG

_STEP = "zarr.json"
_BLOCK = 1 << 24


def base_digest(folder: Path) -> str:
    """Return the SHA-256 of the weights of a folder, in hexadecimal.

    Either kind of folder is read in full. The digest of a step directory is one of names, shapes,
    dtypes and values, so it does not depend on the layout of the ranks that saved them.

    Args:
        folder: A step directory, or a folder with config.json and safetensors files.

    Raises:
        ExchangeError: There are no such files, or one can't be read.
        CheckpointError: The step directory is damaged.
    """
    if (folder / _STEP).is_file():
        return _step_digest(folder)
    paths = sorted(folder.glob("*.safetensors"))
    if not ((folder / CONFIG).is_file() and paths):
        raise ExchangeError(
            f"{folder} has no weights to adapt: neither a {_STEP} of a step nor a {CONFIG} "
            "with safetensors files; restore the base of the adapters"
        )
    digest = hashlib.sha256()
    try:
        for path in [folder / CONFIG, *paths]:
            digest.update(f"{path.name}:{path.stat().st_size}:".encode())
            with path.open("rb") as file:
                while block := file.read(_BLOCK):
                    digest.update(block)
    except OSError as error:
        raise ExchangeError(f"{folder}: {error.strerror or error}; restore the file") from error
    return digest.hexdigest()


def _step_digest(folder: Path) -> str:
    from mt_ckpt import RunFolder, TensorShard, open_arrays

    digest = hashlib.sha256()
    with open_arrays(folder) as arrays:
        for name, spec in sorted(arrays.manifest.arrays.items()):
            if not name.startswith(f"{RunFolder.WEIGHTS}/"):
                continue
            tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            arrays.fill(TensorShard(name, tensor))
            digest.update(f"{name}:{spec.dtype}:{spec.shape}:".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
