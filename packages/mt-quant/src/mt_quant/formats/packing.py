"""Packing of codes into 32-bit words, as checkpoints store them."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack unsigned codes, the first in the lowest bits; the last word is filled with zeros.

    Shape:
        codes: [n, m], integers. Returns int32 [n, ceil(m * bits / 32)].
    """
    each = 32 // bits
    wide = torch.nn.functional.pad(codes.to(torch.int64), (0, -codes.shape[1] % each))
    shifts = torch.arange(each, device=codes.device) * bits
    words = (wide.unflatten(1, (-1, each)) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the first `count` unsigned codes of each row.

    Shape:
        words: int32 [n, w]. Returns uint8 [n, count].
    """
    shifts = torch.arange(32 // bits, device=words.device, dtype=torch.int32) * bits
    codes = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return codes.flatten(1)[:, :count].to(torch.uint8)
