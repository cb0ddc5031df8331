"""Storage of torch dtypes: unchanged, or as unsigned integers of the bits where Zarr lacks them."""

from __future__ import annotations

import numpy as np
import torch

_STORED: dict[str, str] = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "float8_e4m3fn": "|u1",
    "float8_e5m2": "|u1",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "|i1",
    "uint8": "|u1",
    "bool": "|b1",
}
# Floats that are stored as their bits, and the torch dtype of the bits.
_BITS = {
    "bfloat16": torch.uint16,
    "float8_e4m3fn": torch.uint8,
    "float8_e5m2": torch.uint8,
}
_WIDE = np.dtype("<f4")
_DTYPES = {name: np.dtype(stored) for name, stored in _STORED.items()}


def dtype_names() -> list[str]:
    """Return the names of the dtypes that a checkpoint can store."""
    return list(_STORED)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: `torch.bfloat16` -> `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")


def stored_dtype(name: str, *, wide: bool = False) -> np.dtype:
    """Return the little-endian numpy dtype that stores a tensor of dtype `name`.

    Args:
        name: Name of the tensor's dtype.
        wide: Whether format version 1 stored it, where a bfloat16 became a float32.
    """
    return _WIDE if wide and name == "bfloat16" else _DTYPES[name]


def to_stored(tensor: torch.Tensor) -> np.ndarray:
    """Return the tensor's values on the CPU, in its stored dtype."""
    name = dtype_name(tensor.dtype)
    tensor = tensor.detach().cpu().resolve_neg()
    if name in _BITS:
        tensor = tensor.view(_BITS[name])
    return tensor.numpy().astype(stored_dtype(name), copy=False)


def from_stored(array: np.ndarray, name: str) -> torch.Tensor:
    """Return a CPU tensor of dtype `name`, with the bits of the array that stored it."""
    if name == "bfloat16" and array.dtype == _WIDE:  # of version 1; the upper half has the bits
        array = (array.view("<u4") >> 16).astype("<u2")
    tensor = torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), "W"))
    return tensor.view(getattr(torch, name)) if name in _BITS else tensor
