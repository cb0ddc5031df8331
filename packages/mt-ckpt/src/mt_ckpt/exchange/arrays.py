"""The arrays of a checkpoint as tensors, one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mt_ckpt.array import ArraySpec
from mt_ckpt.error import CheckpointError
from mt_ckpt.load import ArrayReader
from mt_ckpt.shard import TensorShard

Report = Callable[[int, int], None]
"""Called with the bytes that are done, and the bytes in all."""


def dtype_of(spec: ArraySpec) -> torch.dtype:
    """Return the dtype of an array's values."""
    return getattr(torch, spec.dtype)


def bytes_of(spec: ArraySpec) -> int:
    """Return the size of an array's values in bytes."""
    return math.prod(spec.shape) * dtype_of(spec).itemsize


def read_array(arrays: ArrayReader, name: str) -> Tensor:
    """Return a whole array.

    Raises:
        CheckpointError: The array is damaged.
    """
    spec = arrays.manifest.arrays[name]
    values = torch.empty(spec.shape, dtype=dtype_of(spec))
    arrays.fill(TensorShard(name, values))
    return values


def below(arrays: ArrayReader, prefix: str) -> Mapping[str, ArraySpec]:
    """Return the arrays of a group by their names in it; all arrays if the prefix is empty.

    Raises:
        CheckpointError: The checkpoint has no such group.
    """
    if not prefix:
        return arrays.manifest.arrays
    start = f"{prefix.strip('/')}/"
    found = {
        name.removeprefix(start): spec
        for name, spec in arrays.manifest.arrays.items()
        if name.startswith(start)
    }
    if not found:
        groups = sorted({name.partition("/")[0] for name in arrays.manifest.arrays})
        raise CheckpointError(
            f"{arrays.path} has no array below {prefix!r}; its groups are {', '.join(groups[:20])}"
        )
    return found


def stored_name(prefix: str, name: str) -> str:
    """Return an array's name in its checkpoint; the inverse of `below`."""
    return f"{prefix.strip('/')}/{name}" if prefix else name
