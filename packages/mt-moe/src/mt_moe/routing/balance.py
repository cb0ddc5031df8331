"""Balancing losses of experts and the z-loss of logits, as sums with counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from mt_parallel_state import Group
from torch import Tensor


@dataclass(frozen=True)
class LossSum:
    """A loss as a sum over tokens, and the number of tokens.

    Both add up over ranks and micro-batches; the loss is the quotient of the totals.

    Attributes:
        sum: Sum over this rank's tokens, times the coefficient, fp32 or fp64. It has the gradient.
        count: Number of this rank's tokens, int64.
    """

    sum: Tensor
    count: Tensor

    @property
    def mean(self) -> Tensor:
        """The loss of this rank's tokens."""
        return self.sum / self.count


def normalized(scores: Tensor) -> Tensor:
    """Return scores divided by their sum, the probabilities of a balancing loss.

    Shape:
        scores: [..., E]. Returns [..., E].
    """
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def count_choices(experts: Tensor, num_experts: int, valid: Tensor | None = None) -> Tensor:
    """Return the number of choices of each expert.

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
    probabilities: Tensor,
    counts: Tensor,
    tokens: Tensor,
    *,
    top_k: int,
    valid: Tensor | None = None,
) -> LossSum:
    """Return the auxiliary loss `E / (k T^2) sum_e (sum_t P_te) c_e` (Fedus et al., 2022).

    The sum is over this rank's tokens with the counts of all ranks, so the sums of all ranks add up
    to `T` times the loss. The loss is 1 for perfect balance.

    Args:
        probabilities: Probabilities of this rank's tokens.
        counts: Number of choices of each expert on all ranks.
        tokens: Number of tokens that made them.
        top_k: Number of experts per token.
        valid: True for real tokens; None means that all are.

    Shape:
        probabilities: [B, S, E]; counts: [B, E] or [1, E]; tokens: [B] or [1]; valid: [B, S].
    """
    own = probabilities if valid is None else probabilities * valid.unsqueeze(-1)
    load = counts.to(own.dtype) / (tokens.to(own.dtype) * top_k).clamp(min=1).unsqueeze(-1)
    each = (own.sum(1) * load).sum() * probabilities.shape[-1]
    return LossSum(each, _num_tokens(probabilities, valid))


def z_loss(logits: Tensor, valid: Tensor | None = None) -> LossSum:
    """Return the sum of `logsumexp(logits)^2` (Zoph et al., 2022).

    Shape:
        logits: [..., E]; valid: [...], True for real tokens.
    """
    each = torch.logsumexp(logits, -1).square()
    total = each.sum() if valid is None else (each * valid).sum()
    return LossSum(total, _num_tokens(logits, valid))


def sum_counts(counts: Tensor, tokens: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Sum choices and numbers of tokens over a group, in one all-reduce.

    Shape:
        counts: [B, E]; tokens: [B]. Returns [B, E] and [B], int64.
    """
    if group is None:
        return counts, tokens
    both = torch.cat([counts, tokens.unsqueeze(1)], 1)
    dist.all_reduce(both, group=group)
    return both[:, :-1], both[:, -1]


def _num_tokens(x: Tensor, valid: Tensor | None) -> Tensor:
    if valid is not None:
        return valid.sum()
    return torch.full((), x.shape[:-1].numel(), device=x.device)
