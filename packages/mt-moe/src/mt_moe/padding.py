"""Rows of each expert filled up with zeros: to a multiple for low precision, or to its capacity."""

from __future__ import annotations

import torch
from torch import Tensor


def padded_counts(counts: Tensor, *, multiple: int = 1, slots: int | None = None) -> Tensor:
    """Return how many rows each expert has after padding; one without rows stays so.

    Shape:
        counts: [E]. Returns the same: multiples of `multiple`, or `slots` everywhere.
    """
    if slots is not None:
        return torch.full_like(counts, slots)
    return (counts + multiple - 1).div(multiple, rounding_mode="floor") * multiple


def padded_places(counts: Tensor, padded: Tensor, rows: int, size: int) -> Tensor:
    """Return where each row goes; rows of no expert go to `size`, behind all.

    Shape:
        counts, padded: [E]. Returns [rows].
    """
    ends = counts.cumsum(0)
    row = torch.arange(rows, device=counts.device)
    expert = torch.searchsorted(ends, row, right=True)
    shift = (padded.cumsum(0) - padded) - (ends - counts)
    place = row + shift[expert.clamp(max=len(counts) - 1)]
    return place.masked_fill(expert >= len(counts), size)


def pad_rows(rows: Tensor, places: Tensor, size: int) -> Tensor:
    """Put rows at their places among zeros.

    Shape:
        rows: [N, H]; places: [N]. Returns [size, H].
    """
    return rows.new_zeros(size + 1, rows.shape[1]).index_copy(0, places, rows)[:size]


def unpad_rows(rows: Tensor, places: Tensor) -> Tensor:
    """Take the rows back from their places; those of no expert are zeros.

    Shape:
        rows: [size, H]; places: [N]. Returns [N, H].
    """
    none = rows.new_zeros(1, rows.shape[1])
    return torch.cat([rows, none]).index_select(0, places)


def padded_size(rows: int, num_experts: int, *, multiple: int = 1, slots: int | None = None) -> int:
    """Return how many rows there are after padding at the most; no host has to ask for counts."""
    if slots is not None:
        return slots * num_experts
    return -(-(rows + num_experts * (multiple - 1)) // multiple) * multiple
