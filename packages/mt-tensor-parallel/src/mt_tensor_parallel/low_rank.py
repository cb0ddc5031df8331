"""The product of two thin matrices beside a linear layer that a group may split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from mt_parallel_state import Group, all_gather, copy_to_group, reduce_from_group, reduce_scatter
from torch import Tensor

from mt_tensor_parallel.gemm import SEQUENCE_DIM


@dataclass(frozen=True, kw_only=True)
class LowRankPlace:
    """The split of a linear layer, for `low_rank`.

    Attributes:
        split: The features that `group` splits; None for a whole layer.
        group: The ranks that split it.
        communicate: Whether the layer runs the collectives that the split needs.
        sequence_parallel: Whether the tokens outside of the layer are split over the group.
    """

    split: Literal["outputs", "inputs"] | None = None
    group: Group = None
    communicate: bool = True
    sequence_parallel: bool = False


def low_rank(
    x: Tensor,
    a: Tensor,
    bs: Sequence[Tensor],
    place: LowRankPlace,
    *,
    multiply: Callable[[Tensor, Tensor], Tensor] = F.linear,
) -> list[Tensor]:
    """Return `B A x` for each B, whose A are stacked in one matrix.

    Only `A x` is communicated, `rank` numbers a token and B: if the outputs are split, its gradient
    is summed over the group (under sequence parallelism it is gathered, and its gradient
    reduce-scattered); if the inputs are split, it is summed itself (or reduce-scattered, and its
    gradient gathered). Without `communicate` nothing is sent: split outputs leave a partial sum in
    the gradient of `x`, and split inputs leave one in the result, as in the layer.

    Args:
        x: Input of the layer.
        a: A of each B, one below the other.
        bs: The second matrices.
        place: Split of the layer.
        multiply: Function of `(x, weight)` that computes `x @ weight.T`.

    Shape:
        x: [..., in]; a: [n * rank, in]; bs: n of [out, rank], all with this rank's sizes. Returns n
        of [..., out].
    """
    thin = multiply(x, a)
    if place.communicate and place.split == "outputs":
        if place.sequence_parallel:
            thin = all_gather(thin, place.group, dim=SEQUENCE_DIM)
        else:
            thin = copy_to_group(thin, place.group)
    elif place.communicate and place.split == "inputs":
        if place.sequence_parallel:
            thin = reduce_scatter(thin, place.group, dim=SEQUENCE_DIM)
        else:
            thin = reduce_from_group(thin, place.group)
    return [multiply(own, b) for own, b in zip(thin.chunk(len(bs), -1), bs, strict=True)]
