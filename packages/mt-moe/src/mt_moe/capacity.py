"""How many tokens an expert takes at most, and which ones it leaves."""

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
    """The most tokens that an expert takes: `ceil(T k / E x factor)` (Fedus et al., 2022).

    T is the number of tokens of all ranks that share a micro-batch's sequences, and the choice is
    made among all of them, so that no cut of the tokens changes it.

    Attributes:
        factor: 1 is a fair share. No token is dropped from `E / k` on.
        policy: `probability` keeps the choices with the highest weights; `position` those that
            come first.
        pad: Whether experts compute on exactly so many rows, zeros included: shapes that depend on
            no choice.

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
                "experts would take no token; leave the capacity away for none"
            )
        if self.policy not in get_args(Policy):
            raise ValueError(f"policy must be one of {get_args(Policy)}, got {self.policy!r}")

    def of(self, tokens: int, top_k: int, num_experts: int) -> int:
        """Return the most rows of an expert."""
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
    together: int | None = None,
) -> Tensor:
    """Say which choices their experts take.

    With a group each rank gathers everybody's choices (12 bytes each, or 20 with an index), and
    all decide alike. No host waits.

    Args:
        weights: Of the choices.
        experts: Their experts; `num_experts` stands for none.
        num_experts: How many there are.
        capacity: See `Capacity`.
        group: The ranks that have the other tokens, each as many as this one.
        token_index: A number for each token, which decides which comes first; `None` is their
            order in the group. It also decides between equal weights.
        together: How many tokens the group has; None is this rank's for each rank, which is too
            many where some are none.

    Shape:
        weights, experts: [T, k]; token_index: [T]. Returns [T, k], bool.
    """
    tokens, k = experts.shape
    ranks = group_size(group)
    limit = capacity.of(tokens * ranks if together is None else together, k, num_experts)
    ids = all_gather(experts, group, dim=0).flatten()
    order = torch.arange(len(ids), device=ids.device)
    if token_index is not None:
        index = all_gather(token_index.to(ids.device).reshape(-1), group, dim=0)
        order = index.argsort(stable=True)
        order = (order.unsqueeze(1) * k + torch.arange(k, device=ids.device)).flatten()
    if capacity.policy == "probability":
        height = all_gather(weights.detach(), group, dim=0).flatten()[order]
        order = order[height.argsort(descending=True, stable=True)]
    order = order[ids[order].argsort(stable=True)]
    counts = ids.new_zeros(num_experts + 1).scatter_add_(0, ids, torch.ones_like(ids))
    starts = counts.cumsum(0) - counts
    place = torch.arange(len(ids), device=ids.device) - starts[ids[order]]
    kept = torch.empty_like(ids, dtype=torch.bool)
    kept[order] = (place < limit) & (ids[order] < num_experts)
    return kept.view(ranks, tokens, k)[group_rank(group)]
