"""Storage of torch dtypes: unchanged, except that bfloat16 becomes float32, bit by bit."""

from __future__ import annotations

import numpy as np
import torch

_STORED: dict[str, str] = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<f4",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "|i1",
    "uint8": "|u1",
    "bool": "|b1",
}


def dtype_names() -> list[str]:
    """Return the names of the dtypes that a checkpoint can store."""
    return list(_STORED)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: `torch.bfloat16` -> `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")


def stored_dtype(name: str) -> np.dtype:
    """Return the little-endian numpy dtype that stores a tensor of dtype `name`."""
    return np.dtype(_STORED[name])


def to_stored(tensor: torch.Tensor) -> np.ndarray:
    """Return the tensor's values on the CPU, in its stored dtype.

    A bfloat16 is the upper half of a float32, so it is widened by a shift: every bit pattern,
    NaN payloads included, comes back.
    """
    tensor = tensor.detach().cpu().resolve_neg()
    if tensor.dtype == torch.bfloat16:
        bits = tensor.view(torch.int16).numpy().view(np.uint16).astype("<u4")
        bits <<= 16
        return bits.view("<f4")
    array = tensor.numpy()
    return array.astype(stored_dtype(dtype_name(tensor.dtype)), copy=False)


def from_stored(array: np.ndarray, name: str) -> torch.Tensor:
    """Return a CPU tensor of dtype `name`; the inverse of `to_stored`."""
    if name == "bfloat16":
        bits = array.view("<u4").astype("<u4")
        bits >>= 16
        return torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), "W"))
