"""Losses that keep experts balanced and logits small, as sums with counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from mt_parallel_state import Group
from torch import Tensor


@dataclass(frozen=True)
class LossSum:
    """A loss as a sum over tokens, and the number of these.

    Both add up over ranks and micro-batches; the loss is the quotient of the two totals.

    Attributes:
        sum: With the coefficient, fp32 or fp64; this has the gradient.
        count: Tokens of this rank, int64.
    """

    sum: Tensor
    count: Tensor

    @property
    def mean(self) -> Tensor:
        """The loss of these tokens alone."""
        return self.sum / self.count


def shares_of(scores: Tensor) -> Tensor:
    """Scores divided by their sum: the probabilities of a balancing loss.

    Shape:
        scores: [..., E]. Returns the same.
    """
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def count_choices(experts: Tensor, num_experts: int, valid: Tensor | None = None) -> Tensor:
    """Count how often each expert is chosen.

    Shape:
        experts: [..., T, k]; valid: [..., T], True for real tokens. Returns [..., E], int64.
    """
    *lead, tokens, choices = experts.shape
    one = experts.new_ones(()).expand_as(experts)
    if valid is not None:
        one = valid.to(experts.dtype).unsqueeze(-1).expand_as(experts)
    out = experts.new_zeros(*lead, num_experts)
    size = tokens * choices
    return out.scatter_add_(-1, experts.reshape(*lead, size), one.reshape(*lead, size))


def balance_loss(
    shares: Tensor, counts: Tensor, tokens: Tensor, *, top_k: int, valid: Tensor | None = None
) -> LossSum:
    """Return the auxiliary loss `E / (k T^2) sum_e (sum_t P_te) c_e` (Fedus et al., 2022).

    The sum is over this rank's tokens and the counts are everybody's, so the sums of all ranks add
    up to `T` times the loss; with perfect balance that is 1.

    Args:
        shares: Probabilities of this rank's tokens.
        counts: Choices of each expert, of all ranks that share the sum.
        tokens: How many tokens made them.
        top_k: Experts per token.
        valid: True for real tokens; None is all.

    Shape:
        shares: [B, S, E]; counts: [B, E] or [1, E]; tokens: [B] or [1]; valid: [B, S].
    """
    own = shares if valid is None else shares * valid.unsqueeze(-1)
    load = counts.to(own.dtype) / (tokens.to(own.dtype) * top_k).clamp(min=1).unsqueeze(-1)
    each = (own.sum(1) * load).sum() * shares.shape[-1]
    return LossSum(each, _number(shares, valid))


def z_loss(logits: Tensor, valid: Tensor | None = None) -> LossSum:
    """Return the sum of `logsumexp(logits)^2` (Zoph et al., 2022).

    Shape:
        logits: [..., E]; valid: [...], True for real tokens.
    """
    each = torch.logsumexp(logits, -1).square()
    total = each.sum() if valid is None else (each * valid).sum()
    return LossSum(total, _number(logits, valid))


def sum_counts(counts: Tensor, tokens: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Sum choices and tokens over the ranks that share them, in one all-reduce.

    Shape:
        counts: [B, E]; tokens: [B]. Returns the same, int64.
    """
    if group is None:
        return counts, tokens
    both = torch.cat([counts, tokens.unsqueeze(1)], 1)
    dist.all_reduce(both, group=group)
    return both[:, :-1], both[:, -1]


def _number(x: Tensor, valid: Tensor | None) -> Tensor:
    if valid is not None:
        return valid.sum()
    return torch.full((), x.shape[:-1].numel(), device=x.device)
