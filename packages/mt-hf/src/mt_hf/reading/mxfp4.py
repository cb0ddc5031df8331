"""Tensors of folders with experts in MXFP4, such as the published GPT-OSS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mt_hf.family.error import ExchangeError
from mt_hf.reading.tensors import StoredTensor

METHOD = "mxfp4"
_BLOCKS, _SCALES = "_blocks", "_scales"
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # values of e2m1; the fourth bit is the sign
_BYTES = 16  # size of the 32 elements of a block
_BIAS = 127
_NAN = 255


@dataclass(frozen=True, kw_only=True)
class StoredExperts(StoredTensor):
    """Weights of experts in 4 bits, with a power of two as the scale of 32 inputs (OCP MX, 2023).

    Attributes:
        blocks: Two codes in a byte, the first in the low half.
        scales: Exponents, plus 127.

    Shape:
        blocks: [experts, out, in / 32, 16]. scales: [experts, out, in / 32]. The tensor itself is
        [experts, in, out], as in the same folder in bf16.
    """

    blocks: StoredTensor
    scales: StoredTensor

    def map(self) -> Tensor:
        """Return the dequantised values, computed at this call."""
        codes, scales = self.blocks.map(), self.scales.map()
        values = torch.tensor([*_VALUES, *(-each for each in _VALUES)])
        made = torch.empty(self.shape, dtype=self.dtype)
        for expert, own, exponents in zip(made, codes, scales, strict=True):
            pairs = torch.stack([own & 15, own >> 4], -1).flatten(-2)
            exponent = (exponents.int() - _BIAS).unsqueeze(-1)
            block = torch.ldexp(values[pairs.int()], exponent)
            block[exponents == _NAN] = torch.nan
            expert.copy_(block.flatten(1).t())
        return made


def with_experts(
    tensors: Mapping[str, StoredTensor], dtype: torch.dtype
) -> dict[str, StoredTensor]:
    """Return a folder's tensors with one tensor instead of the blocks and scales of a weight.

    Args:
        tensors: The folder's tensors by name.
        dtype: Dtype of the dequantised values.

    Raises:
        ExchangeError: Blocks or scales are missing, or they don't fit each other.
    """
    found = dict(tensors)
    ends = (_BLOCKS, _SCALES)
    stored = {name.removesuffix(end) for name in tensors for end in ends if name.endswith(end)}
    for name in sorted(stored):
        blocks, scales = (found.pop(name + end, None) for end in ends)
        if blocks is None or scales is None:
            one, other = (_BLOCKS, _SCALES) if scales is None else (_SCALES, _BLOCKS)
            path = tensors[name + one].path
            raise ExchangeError(
                f"{path}: has {name + one}, and {name + other} is missing; restore it"
            )
        found[name] = _joined(name, blocks, scales, dtype)
    return found


def _joined(
    name: str, blocks: StoredTensor, scales: StoredTensor, dtype: torch.dtype
) -> StoredExperts:
    fits = len(blocks.shape) == 4 and blocks.shape == (*scales.shape, _BYTES)
    if not fits or {blocks.dtype, scales.dtype} != {torch.uint8}:
        raise ExchangeError(
            f"{blocks.path}: {blocks.name} is {blocks.dtype} {list(blocks.shape)} and "
            f"{scales.name} {scales.dtype} {list(scales.shape)}; MXFP4 has bytes [experts, out, "
            f"blocks, {_BYTES}] and [experts, out, blocks]: restore the file"
        )
    experts, out, number, _ = blocks.shape
    return StoredExperts(
        name=name,
        path=blocks.path,
        root=blocks.root,
        dtype=dtype,
        shape=(experts, 2 * _BYTES * number, out),
        start=blocks.start,
        blocks=blocks,
        scales=scales,
    )
