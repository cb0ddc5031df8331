"""Cross entropy from logits, whole or with the vocabulary split over ranks."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_fusions.arguments import check_floating
from mt_fusions.blocks import as_rows, row_blocks, wide_dtype
from mt_fusions.kernels import AUTO, Kernel, cpu_obstacle, kernel_for, serves, triton_obstacle
from mt_fusions.loss import LossOptions, Terms, check_labels, local_labels, loss_of
from mt_fusions.operator import operator


def cross_entropy(  # noqa: PLR0913 - the options of one operation, by keyword
    logits: Tensor,
    labels: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    in_place: bool = False,
    kernel: str = AUTO,
) -> Tensor:
    """`lse - (1 - s) x_label - s mean(x) + z lse^2` of each token; lse: log-sum-exp of x.

    s is torch's label smoothing, z the weight of the z-loss (Chowdhery et al., 2022).
    Computed in fp32 (fp64 for fp64). Backward keeps the logits and a number per
    token. With a group, forward runs an all-reduce MAX of one number per token and an all-reduce
    SUM of two or three, as Megatron-LM does (Shoeybi et al., 2019); backward sends nothing.

    Args:
        logits: This rank's columns, the same number on each.
        labels: Of the whole vocabulary.
        group: The ranks that share the vocabulary; None for one that is not split.
        reduction: "mean" over the tokens that count, as torch's default; "sum", or "none".
        ignore_index: Tokens with this label have loss 0 and no gradient.
        label_smoothing: s, spread over all tokens of the vocabulary, not of a shard.
        z_loss: z.
        vocab_size: Real tokens; columns from there on are padding. None for all.
        in_place: Backward puts the gradient into the memory of the logits, which are then lost: it
            runs once, and nothing else may need them. Rows that overlap, as of `expand`, are copied
            first. A compiled graph has its own memory plan.
        kernel: "auto", or one of "cpu", "triton" and "reference" by name.

    Shape:
        logits: [..., V / ranks]; labels: [...]. Returns a scalar, or [...] unreduced, in fp32 (fp64
        for fp64 logits), the same on all ranks.

    Raises:
        TypeError: Something is no tensor of the right kind.
        ValueError: Shapes, labels or options do not fit, or the kernel does not serve.
    """
    options = LossOptions(
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        vocab_size=vocab_size,
    )
    check_floating("logits", logits)
    check_labels(labels, "logits", logits)
    own = local_labels(labels, logits.shape[-1], group, options)
    how = own.columns, label_smoothing > 0, kernel
    rows = as_rows(logits)
    if in_place and not torch.compiler.is_compiling():
        overlap = len(rows) > 1 and rows.stride(0) < rows.shape[1]
        found = _InPlace.apply(rows.contiguous() if overlap else rows, own.local, how)
    else:
        found = _forward(rows, own.local, *how)
    loss = loss_of(found, own, group, options)  # pyright: ignore[reportArgumentType]
    return loss.view(labels.shape) if reduction == "none" else loss


def _reference(logits: Tensor, labels: Tensor, columns: int, *, wants_total: bool) -> Terms:
    wide = logits[:, :columns].to(wide_dtype(logits.dtype))
    lowest = torch.finfo(wide.dtype).min  # of a shard that is padding, or -inf throughout
    if columns:
        lse = torch.logsumexp(wide, -1).clamp_(min=lowest)
    else:
        lse = wide.new_full((len(wide),), lowest)
    return lse, _target(wide, labels), wide.sum(-1) if wants_total else wide.new_empty(0)


def _target(rows: Tensor, labels: Tensor) -> Tensor:
    """The label's logit, 0 where there is none."""
    if not rows.shape[1]:
        return rows.new_zeros(len(rows))
    found = rows.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    return torch.where(labels >= 0, found, 0)


def _fill(
    out: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, grads: Terms, columns: int
) -> None:
    """Write the gradient of the logits; `out` may be these."""
    wide = logits[:, :columns].to(lse.dtype)
    into = out[:, :columns]
    probs = torch.sub(wide, lse.unsqueeze(1), out=into if into.dtype == wide.dtype else None)
    _finish(out, probs.exp_(), labels, grads, columns)


def _finish(out: Tensor, probs: Tensor, labels: Tensor, grads: Terms, columns: int) -> None:
    """Turn probabilities into the gradient, and write that where they don't stand there already."""
    probs.mul_(grads[0].unsqueeze(1))
    if grads[2].numel():
        probs.add_(grads[2].unsqueeze(1))
    if columns:
        share = torch.where(labels >= 0, grads[1], 0)
        probs.scatter_add_(1, labels.clamp(min=0).unsqueeze(1), share.unsqueeze(1))
    if probs.dtype != out.dtype:
        out[:, :columns].copy_(probs)
    out[:, columns:] = 0


def _cpu_rows(logits: Tensor, labels: Tensor, columns: int, *, wants_total: bool) -> Terms:
    """The log-sum-exp from the largest probability, as torch's softmax has the fastest exponential.

    That is at least 1 / V, so its logarithm has all digits.
    """
    if not columns:
        return _reference(logits, labels, columns, wants_total=wants_total)
    wide = wide_dtype(logits.dtype)
    lse, target = (logits.new_empty(len(logits), dtype=wide) for _ in range(2))
    total = torch.empty_like(lse) if wants_total else lse.new_empty(0)
    rests = [lse, target, *([total] if wants_total else [])]
    scratch = lse.new_empty(0)
    for part, own, part_lse, part_target, *part_total in row_blocks(logits, labels, *rests):
        block = part[:, :columns].to(wide)
        part_target.copy_(_target(block, own))
        for x in part_total:
            torch.sum(block, -1, out=x)
        high = block.amax(-1)
        if block.dtype != part.dtype:
            scratch = block
        elif len(scratch) != len(block):
            scratch = torch.empty_like(block)
        torch.amax(torch.softmax(block, -1, out=scratch), -1, out=part_lse)
        part_lse.log_().neg_().add_(high)
        part_lse.masked_fill_(high == -torch.inf, torch.finfo(wide).min)
    return lse, target, total


def _cpu_fill(
    out: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, grads: Terms, columns: int
) -> None:
    """By the same softmax: the row's probabilities are those by its own log-sum-exp."""
    if not columns:
        out.zero_()
        return
    total = [grads[2]] if grads[2].numel() else []
    tensors = out, logits, labels, lse, *grads[:2], *total
    for into, part, own, part_lse, *rest in row_blocks(*tensors):
        wide, target = part[:, :columns].to(lse.dtype), into[:, :columns]
        probs = torch.softmax(wide, -1, out=target if target.dtype == wide.dtype else wide)
        dead = part_lse == torch.finfo(lse.dtype).min
        if bool(dead.any()):
            probs[dead] = 0
        _finish(into, probs, own, (rest[0], rest[1], rest[2] if total else grads[2]), columns)


def _triton_rows(logits: Tensor, labels: Tensor, columns: int, *, wants_total: bool) -> Terms:
    from mt_fusions.gpu.cross_entropy import forward

    return forward(logits, labels, columns, wants_total=wants_total)


def _triton_fill(
    out: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, grads: Terms, columns: int
) -> None:
    from mt_fusions.gpu.cross_entropy import fill

    fill(out, logits, labels, lse, grads, columns)


CROSS_ENTROPY_KERNELS = (
    Kernel(name="cpu", forward=_cpu_rows, backward=_cpu_fill, obstacle=cpu_obstacle),
    Kernel(name="triton", forward=_triton_rows, backward=_triton_fill, obstacle=triton_obstacle),
    Kernel(name="reference", forward=_reference, backward=_fill, obstacle=serves),
)


def _run(logits: Tensor, labels: Tensor, columns: int, *how: Any) -> Terms:
    wants_total, name = how
    kernel = kernel_for(CROSS_ENTROPY_KERNELS, name, logits)
    return kernel.forward(logits, labels, columns, wants_total=wants_total)


def _fake(logits: Tensor, labels: Tensor, columns: int, *how: Any) -> Terms:
    lse = logits.new_empty(logits.shape[0], dtype=wide_dtype(logits.dtype))
    return lse, torch.empty_like(lse), torch.empty_like(lse) if how[0] else lse.new_empty(0)


def _run_backward(logits: Tensor, labels: Tensor, lse: Tensor, *how: Any) -> Tensor:
    *grads, columns, name = how
    out = logits.new_empty(logits.shape)
    kernel = kernel_for(CROSS_ENTROPY_KERNELS, name, logits)
    kernel.backward(out, logits, labels, lse, tuple(grads), columns)
    return out


def _fake_backward(logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Terms) -> None:
    logits, labels, ctx.columns, ctx.wants_total, ctx.kernel = inputs
    ctx.save_for_backward(logits, labels, output[0])


def _gradient(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    logits, labels, lse = ctx.saved_tensors
    given = (*grads[:2], grads[2] if ctx.wants_total else lse.new_empty(0))
    return (
        _backward(logits, labels, lse, *given, ctx.columns, ctx.kernel),
        *(None for _ in range(4)),
    )


_backward = operator(
    "cross_entropy_backward",
    "(Tensor logits, Tensor labels, Tensor lse, Tensor grad_lse, Tensor grad_target, "
    "Tensor grad_total, int columns, str kernel) -> Tensor",
    _run_backward,
    fake=_fake_backward,
)
_forward = operator(
    "cross_entropy",
    "(Tensor logits, Tensor labels, int columns, bool wants_total, str kernel) "
    "-> (Tensor, Tensor, Tensor)",
    _run,
    fake=_fake,
    setup=_setup,
    gradient=_gradient,
)


class _InPlace(torch.autograd.Function):
    """The same, with a gradient that takes the place of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, how: tuple[int, bool, str]) -> Terms:
        ctx.columns, ctx.wants_total, ctx.kernel = how
        found = _forward(logits, labels, *how)
        ctx.save_for_backward(logits, labels, found[0])
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Unpacked a second time, the logits have another version, and autograd raises.
        logits, labels, lse = ctx.saved_tensors
        given = grads[0], grads[1], grads[2] if ctx.wants_total else lse.new_empty(0)
        kernel = kernel_for(CROSS_ENTROPY_KERNELS, ctx.kernel, logits)
        kernel.backward(logits, logits, labels, lse, given, ctx.columns)
        torch.autograd.graph.increment_version(logits)
        return logits.detach(), None, None
