"""Divergence of a model's scores from a teacher's, block by block over the tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mt_parallel_state import Group, group_rank, reduce_from_group
from mt_tensor_parallel import block_rows
from torch import Tensor
from torch.autograd.function import once_differentiable


class Scoring(NamedTuple):
    """Operands of the product that scores the vocabulary, block by block.

    Attributes:
        hidden: Input of the head's product, after the last norm and the head's transform.
        weight: This rank's rows of the head.
        bias: This rank's biases of the head, or None.
        softcap: Soft cap of the scores, or None.

    Shape:
        hidden: [B, S, H] of whole sequences over tp. weight: [V / tp, H]. bias: [V / tp].
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    softcap: float | None


class Teaching(NamedTuple):
    """A teacher's scores of a batch's tokens, for a student to learn (`batch["teaching"]`).

    Attributes:
        scoring: Operands of the teacher's head.
        temperature: Divisor of the scores of teacher and student.
    """

    scoring: Scoring
    temperature: float


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A divergence's settings and its teacher's side."""

    teaching: Teaching
    counted: Tensor
    vocab_size: int
    group: Group

    def of(self, block: slice, student: Scoring) -> Tensor:
        """Return the sum over a block of tokens."""
        teacher, heat = self.teaching
        with torch.no_grad():
            hidden = teacher.hidden.flatten(0, 1)[block]
            theirs = self._scores(teacher._replace(hidden=hidden))
            theirs = theirs - self._log_sum_exp(theirs).unsqueeze(-1)
            share = theirs.exp()
        ours = self._scores(student)
        apart = torch.where(share > 0, share * (theirs - ours), 0).sum(-1)
        each = reduce_from_group(apart, self.group) + self._log_sum_exp(ours)
        return torch.where(self.counted[block], each, 0).sum() * heat**2

    def _scores(self, scoring: Scoring) -> Tensor:
        """Return the scores over the temperature for this rank's vocabulary; -inf at padding."""
        hidden, weight, bias, softcap = scoring
        scores = F.linear(hidden, weight, bias)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        first = group_rank(self.group) * len(weight)
        is_real = torch.arange(first, first + len(weight), device=scores.device) < self.vocab_size
        return (scores / self.teaching.temperature).masked_fill(~is_real, -math.inf)

    def _log_sum_exp(self, scores: Tensor) -> Tensor:
        """Sum over the whole vocabulary; gradients cover this rank's scores."""
        largest = scores.detach().amax(-1)
        if self.group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        total = reduce_from_group((scores - largest.unsqueeze(-1)).exp().sum(-1), self.group)
        return total.log() + largest


def divergence(
    student: Scoring, teaching: Teaching, counted: Tensor, *, vocab_size: int, group: Group = None
) -> Tensor:
    """Return the sum over tokens of `T^2 KL(teacher || student)`, of scores over T.

    Forward multiplies both heads block by block and makes the gradients too, so that only one
    block's scores are in memory. With a group each block does two all-reduces for each head, and
    one for the sum. Softmax and sums are in fp32 (fp64 for fp64). As in `linear_cross_entropy`, the
    gradient of the hidden states is this rank's part. The factor T^2 keeps the gradients' scale
    (Hinton et al., 2015, https://arxiv.org/abs/1503.02531).

    Args:
        student: Operands of the student's head, which learns.
        teaching: The teacher's side for the same tokens.
        counted: Mask of the tokens that count.
        vocab_size: Size of the vocabulary; further rows of both heads are padding.
        group: Ranks that share the vocabulary.

    Shape:
        counted: bool [B, S]. Returns a scalar.

    Raises:
        ValueError: The teacher has other tokens or another part of the vocabulary.
    """
    teacher = teaching.scoring
    sizes = [(x.hidden.shape[:-1].numel(), len(x.weight)) for x in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the teacher has {sizes[1][0]} tokens and {sizes[1][1]} scores of each on this rank, "
            f"and the student {sizes[0][0]} and {sizes[0][1]}; give both the same batch, and heads "
            "with equal vocab_rows"
        )
    job = _Job(teaching=teaching, counted=counted.flatten(), vocab_size=vocab_size, group=group)
    hidden, *rest, softcap = student
    learns = hidden.flatten(0, 1), *rest
    return cast("Tensor", _Divergence.apply(*learns, softcap, job, torch.is_grad_enabled()))


class _Divergence(torch.autograd.Function):
    """The sum, which makes its gradients in forward."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        *learns, softcap, job, grad_enabled = given
        hidden, weight, _ = learns
        needed = [grad_enabled and need for need in ctx.needs_input_grad[:3]]
        sums = [
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) if need else None
            for x, need in zip(learns, needed, strict=True)
        ]
        size = block_rows(hidden, weight)
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for start in range(0, len(hidden), size):
            block = slice(start, start + size)
            parts = (hidden[block], *learns[1:])
            leaves = [
                None if x is None else x.detach().requires_grad_(need)
                for x, need in zip(parts, needed, strict=True)
            ]
            with torch.enable_grad():
                own = cast("tuple[Tensor, Tensor, Tensor | None]", tuple(leaves))
                loss = job.of(block, Scoring(*own, softcap))
            total += loss.detach()
            wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
            grads = iter(torch.autograd.grad(loss, wanted) if wanted else ())
            places = (None if sums[0] is None else sums[0][block], *sums[1:])
            for place in places:
                if place is not None:
                    place += next(grads)
        ctx.save_for_backward(*sums)
        ctx.dtypes = [None if x is None else x.dtype for x in learns]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        made = (None if x is None else (x * grads[0]).to(dtype) for x, dtype in pairs)
        return *made, None, None, None
