"""Which elements share a scale: shapes of scales, and views in which one dim runs over a block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mt_fp8.scaling import Scaling


def scales_shape(shape: Sequence[int], scaling: Scaling) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor.

    Raises:
        ValueError: The tensor has too few dims.
    """
    shape, block = tuple(shape), scaling.block
    if block == "tensor":
        return ()
    least = 1 if block == "row" or (isinstance(block, tuple) and block[0] == 1) else 2
    if len(shape) < least:
        raise ValueError(
            f"block {block!r} needs a tensor of {least} or more dims, got the shape {shape}; "
            "reshape it, or use block 'tensor'"
        )
    if block == "row":
        return (*shape[:-1], 1)
    if block == "head":
        return (shape[-2], 1)
    if block == "token":
        return (*shape[:-2], 1, 1)
    rows, columns = block
    last = -(-shape[-1] // columns)
    return (last,) if len(shape) == 1 else (*shape[:-2], -(-shape[-2] // rows), last)


def in_blocks(x: Tensor, scaling: Scaling) -> Tensor:
    """Return a tensor whose amax over `block_dims` has the shape of `per_block`.

    Blocks at the edge are filled up with zeros.
    """
    if isinstance(scaling.block, str):
        return x
    rows, columns = scaling.block
    x = x if x.dim() > 1 else x.unsqueeze(0)
    right, below = -x.shape[-1] % columns, -x.shape[-2] % rows
    if right or below:
        x = torch.nn.functional.pad(x, (0, right, 0, below))
    x = x.unflatten(-1, (x.shape[-1] // columns, columns))
    return x.unflatten(-3, (x.shape[-3] // rows, rows))


def out_of_blocks(x: Tensor, shape: Sequence[int], scaling: Scaling) -> Tensor:
    """Undo `in_blocks`."""
    if isinstance(scaling.block, str):
        return x
    x = x.flatten(-4, -3).flatten(-2, -1)
    x = x[0] if len(shape) == 1 else x[..., : shape[-2], :]
    return x[..., : shape[-1]].contiguous()


def block_dims(x: Tensor, scaling: Scaling) -> tuple[int, ...]:
    """Return the dims of `in_blocks(x)` over which a scale is shared."""
    if isinstance(scaling.block, tuple):
        return (-3, -1)
    dims = tuple(range(x.dim()))
    own = {"tensor": dims, "row": (-1,), "token": (-2, -1), "head": (*dims[:-2], -1)}
    return own[scaling.block]


def per_block(scales: Tensor, scaling: Scaling) -> Tensor:
    """Return scales in the shape that spreads over `in_blocks(x)`."""
    if isinstance(scaling.block, str):
        return scales
    scales = scales if scales.dim() > 1 else scales.unsqueeze(0)
    return scales.unsqueeze(-2).unsqueeze(-1)
