"""Cross entropy from logits, whole or with the vocabulary split over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from mt_kernels import AUTO, Candidate, Registry, triton_obstacle
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_fusions.arguments import check_floating
from mt_fusions.blocks import as_rows, row_blocks, wide_dtype
from mt_fusions.losses.kernel import LogitKernel
from mt_fusions.losses.terms import (
    IGNORE_INDEX,
    LossOptions,
    Reduction,
    Terms,
    check_labels,
    local_labels,
    over_ranks,
    reduced,
    token_losses,
)
from mt_fusions.operator import operator


def cross_entropy(  # noqa: PLR0913 - the options of one operation, by keyword
    logits: Tensor,
    labels: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    softcap: float | None = None,
    in_place: bool = False,
    kernel: str = AUTO,
) -> Tensor:
    """Compute the loss of `LossOptions` for each token, and reduce it.

    Computed in fp32 (fp64 for fp64). Backward keeps the logits and a number per
    token. With a group, forward runs an all-reduce MAX of one number per token and an all-reduce
    SUM of two or three, as Megatron-LM does (Shoeybi et al., 2019); backward sends nothing.

    Args:
        logits: This rank's columns, the same number on each rank.
        labels: Labels of the whole vocabulary.
        group: The ranks that share the vocabulary; None for one that is not split.
        reduction: "mean" over the tokens that count, as in torch; "sum", or "none".
        ignore_index: Tokens with this label have loss 0 and no gradient.
        label_smoothing: As in torch, over all tokens of the vocabulary, not of a shard.
        z_loss: Weight of the squared log-sum-exp.
        vocab_size: Number of real tokens; columns from there on are padding. None means all.
        softcap: Logits become `softcap * tanh(logit / softcap)`, in a new tensor in fp32.
        in_place: Backward writes the gradient into the memory of the logits, which are then lost:
            it runs once, and nothing else may need them. Overlapping rows, as after `expand`, are
            copied first. A compiled graph has its own memory plan.
        kernel: "auto", or the name of a kernel: "torch", "triton" or "reference".

    Shape:
        logits: [..., V / ranks]; labels: [...]. Returns a scalar, or [...] unreduced, in fp32 (fp64
        for fp64 logits), the same on all ranks.

    Raises:
        TypeError: An argument is no tensor of the right kind.
        ValueError: Shapes, labels or options do not fit, or the kernel does not serve.
    """
    options = LossOptions(
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        vocab_size=vocab_size,
        softcap=softcap,
    )
    check_floating("logits", logits)
    check_labels(labels, "logits", logits)
    if softcap is not None:
        logits = softcap * torch.tanh(logits.to(wide_dtype(logits.dtype)) / softcap)
    own = local_labels(labels, logits.shape[-1], group, options)
    how = own.columns, label_smoothing > 0, kernel
    rows = as_rows(logits)
    if in_place and not torch.compiler.is_compiling():
        overlap = len(rows) > 1 and rows.stride(0) < rows.shape[1]
        found = _InPlace.apply(rows.contiguous() if overlap else rows, own.local, how)
    else:
        found = _forward(rows, own.local, *how)
    losses = token_losses(over_ranks(found, group), own, options)  # pyright: ignore[reportArgumentType]
    return reduced(losses.view(labels.shape), own.counts, options)


def _lowest(rows: Tensor) -> float:
    """Return the log-sum-exp of a row of padding or of -inf."""
    return torch.finfo(rows.dtype).min


def _reference(logits: Tensor, labels: Tensor, columns: int, *, wants_total: bool) -> Terms:
    wide = logits[:, :columns].to(wide_dtype(logits.dtype))
    if columns:
        lse = torch.logsumexp(wide, -1).clamp_(min=_lowest(wide))
    else:
        lse = wide.new_full((len(wide),), _lowest(wide))
    return lse, _target(wide, labels), wide.sum(-1) if wants_total else wide.new_empty(0)


def _target(rows: Tensor, labels: Tensor) -> Tensor:
    """Return each label's logit, 0 where there is none."""
    if not rows.shape[1]:
        return rows.new_zeros(len(rows))
    found = rows.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    return torch.where(labels >= 0, found, 0)


def _reference_gradient(
    out: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, grads: Terms, columns: int
) -> None:
    wide = logits[:, :columns].to(lse.dtype)
    into = out[:, :columns]
    probs = torch.sub(wide, lse.unsqueeze(1), out=into if into.dtype == wide.dtype else None)
    _write_gradient(out, probs.exp_(), labels, grads, columns)


def gradient_of_(
    probs: Tensor, labels: Tensor, grads: tuple[Tensor | None, Tensor, Tensor]
) -> None:
    """Turn probabilities into the gradient of the logits.

    Args:
        probs: Probabilities of this rank's columns.
        labels: Their columns, -1 for none.
        grads: Gradients of a row's log-sum-exp (None for 1), label's logit and sum (may be empty).
    """
    of_lse, of_target, of_total = grads
    if of_lse is not None:
        probs.mul_(of_lse.unsqueeze(1))
    if of_total.numel():
        probs.add_(of_total.unsqueeze(1))
    if probs.shape[1]:
        share = torch.where(labels >= 0, of_target, 0)
        probs.scatter_add_(1, labels.clamp(min=0).unsqueeze(1), share.unsqueeze(1))


def _write_gradient(out: Tensor, probs: Tensor, labels: Tensor, grads: Terms, columns: int) -> None:
    """Write the gradient into `out`, unless the probabilities stand there already."""
    gradient_of_(probs, labels, grads)
    if probs.dtype != out.dtype:
        out[:, :columns].copy_(probs)
    out[:, columns:] = 0


def _softmax(
    rows: Tensor, labels: Tensor, *, wants_total: bool, out: Tensor | None
) -> tuple[Terms, Tensor]:
    """Return the terms of rows in fp32 or fp64, and their probabilities.

    The log-sum-exp comes from the largest probability, since torch's softmax has the fastest
    exponential. That probability is at least 1 / V, so its logarithm has all digits.
    """
    target = _target(rows, labels)
    total = rows.sum(-1) if wants_total else rows.new_empty(0)
    if not rows.shape[1]:
        return (rows.new_full((len(rows),), _lowest(rows)), target, total), rows
    high = rows.amax(-1)
    probs = torch.softmax(rows, -1, out=out)
    lse = high - probs.amax(-1).log_()
    return (lse.masked_fill_(high == -torch.inf, _lowest(rows)), target, total), probs


def _torch_softmax(logits: Tensor, labels: Tensor, *, wants_total: bool) -> tuple[Terms, Tensor]:
    rows = logits.to(wide_dtype(logits.dtype))
    # A graph takes no `out` with strides; row by row, softmax may otherwise be in place.
    out = None if torch.compiler.is_compiling() else rows
    return _softmax(rows, labels, wants_total=wants_total, out=out)


def _torch_rows(logits: Tensor, labels: Tensor, columns: int, *, wants_total: bool) -> Terms:
    wide, scratch = wide_dtype(logits.dtype), None
    found: list[Terms] = []
    for part, own in row_blocks(logits, labels, elements=_block_elements(logits)):
        rows = part[:, :columns].to(wide)
        # Where `rows` are the logits themselves, the probabilities need memory of their own.
        if rows.dtype == part.dtype and (scratch is None or len(scratch) != len(rows)):
            scratch = torch.empty_like(rows)
        out = rows if rows.dtype != part.dtype else scratch
        found.append(_softmax(rows, own, wants_total=wants_total, out=out)[0])
    lse, target, total = (torch.cat(parts) for parts in zip(*found, strict=True))
    return lse, target, total


def _torch_gradient(
    out: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, grads: Terms, columns: int
) -> None:
    """Use the same softmax: a row's probabilities have its own log-sum-exp."""
    if not columns:
        out.zero_()
        return
    total = [grads[2]] if grads[2].numel() else []
    tensors = out, logits, labels, lse, *grads[:2], *total
    for into, part, own, part_lse, *rest in row_blocks(*tensors, elements=_block_elements(logits)):
        wide, target = part[:, :columns].to(lse.dtype), into[:, :columns]
        probs = torch.softmax(wide, -1, out=target if target.dtype == wide.dtype else wide)
        dead = part_lse == _lowest(lse)
        if bool(dead.any()):
            probs[dead] = 0
        slopes = rest[0], rest[1], rest[2] if total else grads[2]
        _write_gradient(into, probs, own, slopes, columns)


def _block_elements(logits: Tensor) -> int:
    """Return the logits of a block for each thread: few on a CPU, to stay in its cache."""
    return 1 << 19 if logits.device.type == "cpu" else 1 << 24


def _triton_rows(logits: Tensor, labels: Tensor, columns: int, *, wants_total: bool) -> Terms:
    from mt_fusions.gpu.cross_entropy import forward

    return forward(logits, labels, columns, wants_total=wants_total)


def _triton_gradient(
    out: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, grads: Terms, columns: int
) -> None:
    from mt_fusions.gpu.cross_entropy import fill

    fill(out, logits, labels, lse, grads, columns)


def _torch_obstacle(x: Tensor) -> str | None:
    """Leave logits on a GPU to Triton."""
    if x.is_cuda and triton_obstacle(x) is None:
        return "Triton reads the logits fewer times"
    return None


TORCH = LogitKernel(_torch_rows, _torch_gradient, _torch_softmax)
CROSS_ENTROPY_KERNELS: Registry[LogitKernel] = Registry(
    "cross_entropy",
    (
        Candidate("torch", TORCH, _torch_obstacle),
        Candidate("triton", LogitKernel(_triton_rows, _triton_gradient), triton_obstacle),
        Candidate("reference", LogitKernel(_reference, _reference_gradient)),
    ),
)


def _run(logits: Tensor, labels: Tensor, columns: int, *how: Any) -> Terms:
    wants_total, name = how
    kernel = CROSS_ENTROPY_KERNELS.find(name, logits).function
    return kernel.forward(logits, labels, columns, wants_total=wants_total)


def _fake(logits: Tensor, labels: Tensor, columns: int, *how: Any) -> Terms:
    lse = logits.new_empty(logits.shape[0], dtype=wide_dtype(logits.dtype))
    return lse, torch.empty_like(lse), torch.empty_like(lse) if how[0] else lse.new_empty(0)


def _run_backward(logits: Tensor, labels: Tensor, lse: Tensor, *how: Any) -> Tensor:
    *grads, columns, name = how
    out = logits.new_empty(logits.shape)
    kernel = CROSS_ENTROPY_KERNELS.find(name, logits).function
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
        kernel = CROSS_ENTROPY_KERNELS.find(ctx.kernel, logits).function
        kernel.backward(logits, logits, labels, lse, given, ctx.columns)
        torch.autograd.graph.increment_version(logits)
        return logits.detach(), None, None
