"""Rows of each expert padded with zeros, to a multiple or to a capacity."""

from __future__ import annotations

import torch
from torch import Tensor


def padded_counts(counts: Tensor, *, multiple: int = 1, capacity: int | None = None) -> Tensor:
    """Return the number of rows of each expert after padding; an idle expert stays without rows.

    Shape:
        counts: [E]. Returns [E]: multiples of `multiple`, or `capacity` everywhere.
    """
    if capacity is not None:
        return torch.full_like(counts, capacity)
    return (counts + multiple - 1).div(multiple, rounding_mode="floor") * multiple


def padded_places(counts: Tensor, padded: Tensor, rows: int, size: int) -> Tensor:
    """Return the index of each row after padding; rows without an expert get the index `size`.

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
    """Copy rows to their places among zeros.

    Shape:
        rows: [N, H]; places: [N]. Returns [size, H].
    """
    return rows.new_zeros(size + 1, rows.shape[1]).index_copy(0, places, rows)[:size]


def unpad_rows(rows: Tensor, places: Tensor) -> Tensor:
    """Return the rows at their places; rows without an expert are zero.

    Shape:
        rows: [size, H]; places: [N]. Returns [N, H].
    """
    none = rows.new_zeros(1, rows.shape[1])
    return torch.cat([rows, none]).index_select(0, places)


def padded_size(
    rows: int, num_experts: int, *, multiple: int = 1, capacity: int | None = None
) -> int:
    """Return an upper bound of the number of rows after padding, without asking for counts."""
    if capacity is not None:
        return capacity * num_experts
    return -(-(rows + num_experts * (multiple - 1)) // multiple) * multiple


def only_first(rows: Tensor, kept: Tensor | None) -> Tensor:
    """Set all rows after the first `kept` to zero, and their gradients; None keeps all.

    Shape:
        rows: [N, H]; kept: [].
    """
    if kept is None:
        return rows
    none = torch.arange(len(rows), device=rows.device) >= kept
    return rows.masked_fill(none.unsqueeze(1), 0)
