"""Upcycling: the weights of experts, made from a dense feed-forward's."""

from __future__ import annotations

import torch
from mt_files import check_type
from torch import Tensor


def upcycle(
    up: Tensor, down: Tensor, num_experts: int, *, granularity: int = 1, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Cut a dense feed-forward into shards along its width, and copy the shards to experts.

    Expert `e` holds shard `e % granularity`, so `granularity` neighbours together are a copy of the
    dense layer (He et al., 2024, "virtual groups"). A token that chooses whole copies, with weights
    that sum to 1, gets the dense layer's result; `upcycle_router` makes all tokens choose so.

    Args:
        up: Weight of the dense layer's first projection.
        down: Weight of its second projection.
        num_experts: Number of experts to make, a multiple of the granularity.
        granularity: Number of shards that make a copy.
        scale: Factor of `down`; None is the granularity, for weights that sum to 1. If weights are
            a softmax over all experts that is not normalised again, use
            `granularity * num_experts / top_k`, which is exact for a router without preferences.

    Shape:
        up: [2, ffn, hidden] with a gate (gate first), [ffn, hidden] without; down: [hidden, ffn].
        Returns [E, 2, ffn / granularity, hidden] or [E, ffn / granularity, hidden], and
        [E, hidden, ffn / granularity]: the weights of `Experts`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The shapes don't fit each other, or the granularity does not divide them.
    """
    check_type("up", up, Tensor)
    check_type("down", down, Tensor)
    check_type("num_experts", num_experts, int)
    check_type("granularity", granularity, int)
    _check_shapes(up, down)
    copies = _copies(num_experts, granularity)
    if down.shape[1] % granularity:
        raise ValueError(
            f"granularity={granularity} does not divide the width {down.shape[1]} of the dense "
            "layer; use a divisor"
        )
    wide = torch.stack(up.chunk(granularity, -2))
    narrow = torch.stack(down.chunk(granularity, 1))
    narrow = narrow * (granularity if scale is None else scale)
    return torch.cat([wide] * copies), torch.cat([narrow] * copies)


def upcycle_router(weight: Tensor, num_experts: int) -> Tensor:
    """Give all shards of a copy the same router row, so that a token chooses whole copies.

    This holds if `top_k` is a multiple of the granularity, and until training separates the rows.

    Args:
        weight: Initial router weight with a row for each copy.
        num_experts: Number of experts; divided by the number of rows it is the granularity.

    Shape:
        weight: [copies, hidden]. Returns [E, hidden].

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The number of rows does not divide the number of experts.
    """
    check_type("weight", weight, Tensor)
    check_type("num_experts", num_experts, int)
    if weight.dim() != 2 or not len(weight) or num_experts % len(weight) or num_experts < 1:
        raise ValueError(
            f"weight {tuple(weight.shape)} must be [copies, hidden], and its rows divide the "
            f"{num_experts} experts"
        )
    return weight.repeat_interleave(num_experts // len(weight), 0)


def _copies(num_experts: int, granularity: int) -> int:
    if granularity < 1 or num_experts < 1 or num_experts % granularity:
        raise ValueError(
            f"num_experts={num_experts} must be a multiple of granularity={granularity}, both at "
            "least 1: copies are whole"
        )
    return num_experts // granularity


def _check_shapes(up: Tensor, down: Tensor) -> None:
    gated = up.dim() == 3 and up.shape[0] == 2
    if down.dim() != 2 or not (gated or up.dim() == 2) or up.shape[-2:] != down.shape[::-1]:
        raise ValueError(
            f"up {tuple(up.shape)} must be [2, ffn, hidden] with a gate or [ffn, hidden] without, "
            f"and down {tuple(down.shape)} [hidden, ffn] of the same sizes"
        )
