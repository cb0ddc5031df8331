"""Capacity: how many tokens an expert takes at most, and which ones it drops."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from mt_parallel_state import Group, all_gather, group_rank, group_size
from torch import Tensor

Policy = Literal["probability", "position"]


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The largest number of tokens of an expert: `ceil(T k / E x factor)` (Fedus et al., 2022).

    T is the number of tokens on all ranks that share a micro-batch's sequences. Tokens of all these
    ranks compete, so the result does not depend on how they are split.

    Attributes:
        factor: Multiple of a fair share. With `E / k` or more no token is dropped.
        policy: `probability` keeps the choices with the highest weights, and of equal ones those
            that come first; `position` keeps those that come first. Weights that differ by 2^-16 of
            themselves or less may count as equal.
        pad: Pad the rows of each expert with zeros to its capacity, so that shapes don't depend on
            the choices.

    Raises:
        ValueError: A field is out of range.
    """

    factor: float
    policy: Policy = "probability"
    pad: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise ValueError(
                f"factor must be finite and above 0, got {self.factor}: with a capacity of 0 "
                "experts would take no token; use no capacity to drop none"
            )
        if self.policy not in get_args(Policy):
            raise ValueError(f"policy must be one of {get_args(Policy)}, got {self.policy!r}")

    def of(self, tokens: int, top_k: int, num_experts: int) -> int:
        """Return the largest number of rows of an expert."""
        return math.ceil(tokens * top_k / num_experts * self.factor)


@torch.no_grad()
def kept_choices(
    weights: Tensor,
    experts: Tensor,
    num_experts: int,
    capacity: Capacity,
    *,
    group: Group = None,
    token_index: Tensor | None = None,
    group_tokens: int | None = None,
) -> Tensor:
    """Return which choices are kept.

    With a group each rank gathers all choices (12 bytes each, or 20 with an index), and all ranks
    decide alike. The host does not wait.

    Args:
        weights: Weights of the choices.
        experts: Chosen experts; `num_experts` means no expert.
        num_experts: Number of experts.
        capacity: See `Capacity`.
        group: The ranks with the other tokens; each has as many as this one.
        token_index: A number for each token; lower ones come first, also among equal weights. None
            is the order in the group.
        group_tokens: Number of the group's tokens; None is this rank's number for each rank, which
            counts padding too.

    Shape:
        weights, experts: [T, k]; token_index: [T]. Returns [T, k], bool.
    """
    tokens, k = experts.shape
    ranks = group_size(group)
    limit = capacity.of(tokens * ranks if group_tokens is None else group_tokens, k, num_experts)
    ids = all_gather(experts, group, dim=0).flatten()
    order = torch.arange(len(ids), device=ids.device)
    if token_index is not None:
        index = all_gather(token_index.to(ids.device).reshape(-1), group, dim=0)
        order = index.argsort(stable=True)
        order = (order.unsqueeze(1) * k + torch.arange(k, device=ids.device)).flatten()
    if capacity.policy == "probability":
        height = _without_noise(all_gather(weights.detach(), group, dim=0).flatten())[order]
        order = order[height.argsort(descending=True, stable=True)]
    order = order[ids[order].argsort(stable=True)]
    counts = ids.new_zeros(num_experts + 1).scatter_add_(0, ids, torch.ones_like(ids))
    starts = counts.cumsum(0) - counts
    place = torch.arange(len(ids), device=ids.device) - starts[ids[order]]
    kept = torch.empty_like(ids, dtype=torch.bool)
    kept[order] = (place < limit) & (ids[order] < num_experts)
    return kept.view(ranks, tokens, k)[group_rank(group)]


def _without_noise(weights: Tensor) -> Tensor:
    """Round to 16 bits, and scale by a constant.

    Equal tokens, such as the first ones of two texts, have equal weights except for rounding. The
    sign of the rounding depends on the layout; the order of the tokens must not.
    """
    mantissa, exponent = torch.frexp(weights.float() if weights.itemsize < 4 else weights)
    return torch.ldexp((mantissa * 2**16).round(), exponent)
