"""Biases of attention's scores, by the distance of query and key."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mt_model.score_bias import AlibiConfig, RelativeConfig, ScoreBias


def bias_by_distance(
    bias: ScoreBias,
    weight: Tensor | None,
    heads: range,
    *,
    num_heads: int,
    length: int,
    device: torch.device,
) -> Tensor:
    """Return what is added to scores, by distance.

    Args:
        bias: The kind.
        weight: Of its table, with these heads, or None for a kind without one.
        heads: Of this rank.
        num_heads: Of the whole model.
        length: One more than the largest distance.
        device: Of the result.

    Shape:
        weight: [buckets, heads]. Returns [heads, 2 * length - 1], where the distance d = query -
        key stands at d + length - 1; fp64 without a table, else in its dtype.
    """
    distance = torch.arange(1 - length, length, device=device)
    if isinstance(bias, AlibiConfig):
        slopes = bias.slopes(num_heads)[heads.start : heads.stop]
        column = torch.tensor(slopes, dtype=torch.float64)[:, None]
        return column.to(device, non_blocking=True) * -distance.abs()
    if isinstance(bias, RelativeConfig) and weight is not None:
        return weight[buckets_of(distance, bias)].T
    raise TypeError(f"{type(bias).__name__} is no bias of scores that attention knows")


def buckets_of(distance: Tensor, bias: RelativeConfig) -> Tensor:
    """Return the bucket of each distance from a query back to a key.

    The logarithm is taken in fp32, as by T5: a bucket is its whole part, and near a bound another
    rounding would give another bucket.
    """
    if bias.bidirectional:
        far, first = distance.abs(), (distance < 0).long() * bias.of_direction
    else:
        far, first = distance.clamp(min=0), 0
    logs = torch.log(far.float() / bias.exact) / math.log(bias.max_distance / bias.exact)
    grown = (logs * (bias.of_direction - bias.exact)).clamp(min=0).long() + bias.exact
    last = bias.of_direction - 1
    return first + torch.where(far < bias.exact, far, grown.clamp(max=last))


def spread(by_distance: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Give each pair the bias of its distance.

    Shape:
        by_distance: [H, 2 * length - 1]; queries: [..., S]; keys: [..., T], places below the
        length. Returns [..., H, S, T].
    """
    middle = by_distance.shape[1] // 2
    distance = queries[..., :, None] - keys[..., None, :] + middle
    return by_distance[:, distance].movedim(0, -3)


def spread_in_order(by_distance: Tensor) -> Tensor:
    """`spread` of the places 0, 1, 2 and on, with themselves: rows of one tensor, without an index.

    Shape:
        by_distance: [H, 2 * S - 1]. Returns [H, S, S].
    """
    return by_distance.flip(1).unfold(1, by_distance.shape[1] // 2 + 1, 1).flip(1)
