"""Biases of attention scores by the distance of query and key."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_model.attend.score_bias import AlibiConfig, RelativeConfig, ScoreBias


def bias_by_distance(
    bias: ScoreBias,
    weight: Tensor | None,
    heads: range,
    *,
    num_heads: int,
    length: int,
    device: torch.device,
) -> Tensor:
    """Return the bias of the scores by distance.

    Args:
        bias: Kind of bias.
        weight: Weight of its table for these heads, or None for a kind without a table.
        heads: Heads of this rank.
        num_heads: Number of heads of the whole model.
        length: Largest distance plus one.
        device: Device of the result.

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

    The logarithm is in fp32, as in T5: a bucket is its whole part, and near a bound another
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


def spread_in_order(by_distance: Tensor, queries: range, keys: range) -> Tensor:
    """Spread biases over consecutive places, without an index; see `spread`.

    Shape:
        by_distance: [H, 2 * length - 1]; queries, keys: S and T places below the length. Returns
        [H, S, T].
    """
    own, (height, width) = _between(by_distance, queries, keys), (len(queries), len(keys))
    # In rows of one more number than there are distances, each row begins one distance later.
    rows = F.pad(own.flip(1), (0, 1))[:, None].expand(-1, height, -1).flatten(1)
    skewed = rows[:, :-height].unflatten(1, (height, -1))
    return skewed[..., height - 1 : height - 1 + width]


def add_in_order(by_distance: Tensor, by_pair: Tensor, queries: range, keys: range) -> None:
    """Add each pair to its distance, in place: the adjoint of `spread_in_order`.

    Shape:
        by_distance: [H, 2 * length - 1]; by_pair: [B, H, S, T], of any dtype.
    """
    own, height = _between(by_distance, queries, keys), len(queries)
    distances = own.shape[1]
    skewed = by_distance.new_zeros(len(own), height * (distances + 1))
    places = skewed[:, height - 1 :].as_strided(
        (len(own), height, len(keys)), (skewed.stride(0), distances, 1)
    )
    torch.sum(by_pair, 0, dtype=by_distance.dtype, out=places)
    own += skewed.unflatten(1, (height, -1)).sum(1)[:, :-1].flip(1)


def _between(by_distance: Tensor, queries: range, keys: range) -> Tensor:
    """Return the distances from some queries back to some keys, as a view."""
    least = by_distance.shape[1] // 2 + queries.start - (keys.stop - 1)
    return by_distance[:, least : least + len(queries) + len(keys) - 1]
