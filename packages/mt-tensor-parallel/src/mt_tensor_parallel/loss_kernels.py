"""The ways to turn logits into losses and gradient; mt-fusions is imported where it is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from mt_tensor_parallel.loss_terms import LossTerms

Part: TypeAlias = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class LossKernel:
    """One way to compute the losses of some tokens, and the gradient of their logits.

    Logits are overwritten where they have the dtype that is computed in, or `in_cache` is False:
    outside of compiled graphs by their gradient.

    Attributes:
        name: In messages, and to ask for it.
        run: Returns the summed loss, the summed square of the log-sum-exp for a z-loss, and the
            gradient, for logits [N, terms.columns] and labels [N].
        obstacle: Why it can't serve logits like a tensor; None where it serves.
        in_cache: On a CPU it wants few rows at a time.
    """

    name: str
    run: Callable[[Tensor, Tensor, LossTerms], Part]
    obstacle: Callable[[Tensor], str | None]
    in_cache: bool = False


def _serves(x: Tensor) -> None:
    del x


def _fused_obstacle(x: Tensor) -> str | None:
    """Why there is none; in a compiled graph the kernel says it itself, when it runs."""
    if torch.compiler.is_compiling():
        return None
    from mt_fusions import fused_kernel, obstacles

    return obstacles("cross_entropy", x)[fused_kernel(x)]


def _own_columns(labels: Tensor, terms: LossTerms) -> tuple[Tensor, Tensor, Tensor]:
    """Which tokens count, which of these have their label here, and its column."""
    counts = labels != terms.ignore_index
    local = labels - terms.first
    return counts, counts & (local >= 0) & (local < terms.columns), local


def _sums(counts: Tensor, terms: LossTerms, lse: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
    loss = torch.where(counts, loss, 0).sum()
    square = torch.where(counts, lse.square(), 0).sum() if terms.z_loss else loss.new_zeros(())
    return loss, square


def _by_torch(logits: Tensor, labels: Tensor, terms: LossTerms) -> Part:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    wide, slope = terms.capped(wide)
    counts, mine, local = _own_columns(labels, terms)
    column = torch.where(mine, local, 0)
    if terms.columns:
        target = torch.where(mine, wide.gather(1, column.unsqueeze(1)).squeeze(1), 0)
        sums = wide.sum(-1) if terms.smoothing else None
        largest = wide.amax(dim=-1)
        # Row by row, so it may be in place; graphs take no `out` with strides.
        in_place = None if torch.compiler.is_compiling() else wide
        probs = torch.softmax(wide, dim=-1, out=in_place)
        # log-sum-exp from the largest probability, at least 1/V: no second pass of exp.
        lse = largest - probs.amax(dim=-1).log_()
    else:  # nothing but padding here
        probs, target = wide, wide.new_zeros(len(labels))
        sums = target if terms.smoothing else None
        lse = torch.full_like(target, torch.finfo(wide.dtype).min)
    if terms.group is not None:
        whole, target, sums = terms.over_ranks(lse, target, sums)
        probs.mul_((lse - whole).exp_().unsqueeze(1))
        lse = whole
    loss, square = _sums(counts, terms, lse, terms.loss(lse, target, sums))
    if terms.columns:
        terms.grad_(probs, lse, column, mine)
        if slope is not None:
            probs.mul_(slope)
    return loss, square, probs


def _by_parts(logits: Tensor, labels: Tensor, terms: LossTerms, *, plain: bool) -> Part:
    """By mt-fusions."""
    from mt_fusions import cross_entropy_gradient_, cross_entropy_parts, fused_kernel

    kernel, slope = "reference" if plain else fused_kernel(logits), None
    if terms.softcap is not None:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits, slope = terms.capped(wide)
    counts, mine, local = _own_columns(labels, terms)
    column = torch.where(mine, local, -1)
    with_sum = terms.smoothing > 0
    own, target, sums = cross_entropy_parts(logits, column, with_sum=with_sum, kernel=kernel)
    lse = own
    if terms.group is not None:
        lse, target, sums = terms.over_ranks(own, target, sums)
    loss, square = _sums(counts, terms, lse, terms.loss(lse, target, sums))
    of_sum = torch.full_like(lse, -terms.smoothing / terms.vocab_size) if with_sum else None
    of_lse = (1 + 2 * terms.z_loss * lse) * (own - lse).exp_()  # 1 if no other rank has columns
    grads = of_lse, torch.full_like(lse, terms.smoothing - 1), of_sum
    out = cross_entropy_gradient_(logits, column, own, grads, kernel=kernel)
    return loss, square, out if slope is None else out.mul_(slope)


LOSS_KERNELS = (
    LossKernel("torch", _by_torch, _serves, in_cache=True),
    LossKernel("fused", partial(_by_parts, plain=False), _fused_obstacle),
    LossKernel("reference", partial(_by_parts, plain=True), _serves),
)


def logits_loss(logits: Tensor, labels: Tensor, terms: LossTerms, kernel: LossKernel) -> Tensor:
    """The loss of each token by a kernel of mt-fusions, for logits that are there already.

    Shape:
        logits: [N, V / ranks]; labels: [N]. Returns [N].
    """
    from mt_fusions import cross_entropy, fused_kernel

    if terms.softcap is not None:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = terms.softcap * torch.tanh(wide / terms.softcap)
    return cross_entropy(
        logits,
        labels,
        group=terms.group,
        reduction="none",
        ignore_index=terms.ignore_index,
        label_smoothing=terms.smoothing,
        z_loss=terms.z_loss,
        vocab_size=terms.vocab_size,
        kernel=kernel.name if kernel.name == "reference" else fused_kernel(logits),
    )
