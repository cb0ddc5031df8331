"""Cross entropy over logits whose vocabulary is split over a group."""

from __future__ import annotations

from typing import Any, cast

import torch
from mt_files import check_type, kernel_for
from mt_parallel_state import Group, apply_outside_graph
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_tensor_parallel.arguments import check_labels
from mt_tensor_parallel.embedding import check_range
from mt_tensor_parallel.loss_kernels import LOSS_KERNELS, logits_loss
from mt_tensor_parallel.loss_terms import PLAIN_LOSS, LossOptions, LossTerms


def _rows_per_block(logits: Tensor) -> int:
    """Rows whose fp32 copy stays in cache on a CPU; an accelerator takes larger bites."""
    # torch.compile does not trace the question for threads.
    threads = 1 if torch.compiler.is_compiling() else torch.get_num_threads()
    elements = threads << 17 if logits.device.type == "cpu" else 1 << 27
    return max(threads, elements // max(1, logits.shape[-1]))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, terms: LossTerms, step: int) -> Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        count = logits.shape[0]
        local = labels - terms.first
        foreign = (local < 0) | (local >= terms.columns)
        local = local.masked_fill(foreign, 0)
        lowest = torch.finfo(wide).min  # of a shard that is padding or -inf throughout
        high = logits.new_full((count,), lowest, dtype=wide)
        total = torch.zeros_like(high)
        sums = torch.zeros_like(high) if terms.smoothing else None
        for start in range(0, count if terms.columns else 0, step):
            rows = slice(start, start + step)
            block, _ = terms.capped(logits[rows, : terms.columns].to(wide, copy=True))
            if sums is not None:
                torch.sum(block, -1, out=sums[rows])
            torch.clamp(block.amax(-1), min=lowest, out=high[rows])
            torch.sum(block.sub_(high[rows, None]).exp_(), -1, out=total[rows])
        target, _ = terms.capped(logits.gather(1, local[:, None]).squeeze(1).to(wide))
        target = target.masked_fill(foreign, 0)
        log_sum = high + total.log()
        if terms.group is not None:
            log_sum, target, sums = terms.over_ranks(log_sum.clamp_(min=lowest), target, sums)
        ignored = labels == terms.ignore_index
        ctx.terms, ctx.step = terms, step
        ctx.save_for_backward(logits, log_sum, local, foreign, ignored)
        return terms.loss(log_sum, target, sums).masked_fill(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, log_sum, local, foreign, ignored = ctx.saved_tensors
        terms: LossTerms = ctx.terms
        step: int = ctx.step
        scale = grads[0].masked_fill(ignored, 0)
        out = torch.empty_like(logits)
        out[:, terms.columns :] = 0
        for start in range(0, logits.shape[0] if terms.columns else 0, step):
            rows = slice(start, start + step)
            block, slope = terms.capped(logits[rows, : terms.columns].to(scale.dtype, copy=True))
            block.sub_(log_sum[rows, None]).exp_()
            terms.grad_(block, log_sum[rows], local[rows], ~foreign[rows])
            block.mul_(scale[rows, None])
            out[rows, : terms.columns] = block if slope is None else block.mul_(slope)
        return out, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    group: Group = None,
    options: LossOptions = PLAIN_LOSS,
) -> Tensor:
    """The cross entropy of each token, with the vocabulary split over `group`.

    `loss = log(sum_k exp(x_k - M)) - (x_label - M)` with M the largest logit, as in Megatron-LM
    (Shoeybi et al. 2019). Forward runs two all-reduces of one or two numbers per token (MAX, then
    SUM of the exponentials' sums and of the label's logit); backward sends nothing. Everything is
    computed in fp32 (fp64 for fp64 logits), block of rows by block of rows, so no fp32 copy of the
    logits exists. Kept for backward: the logits themselves and one number per token.

    Args:
        logits: This rank's part of the logits.
        labels: Global token ids, or `ignore_index` for tokens with loss 0 and no gradient.
        group: `None` means the vocabulary is whole.
        options: What the loss is made of; by default the cross entropy alone.

    Shape:
        logits: [..., V / ranks]. labels: [...] int64. Returns [...], fp32 (fp64 for fp64 logits),
        equal on all ranks; gradients flow to the own part of the logits.

    Raises:
        ValueError: Shapes do not match, a label is outside the vocabulary, or an option is out of
            range.
    """
    check_type("logits", logits, Tensor)
    check_labels(labels, "labels")
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} do not match logits of shape "
            f"{tuple(logits.shape)}: they must have the shape of logits without the last dim"
        )
    terms, labels = LossTerms(logits.shape[-1], group, options), labels.long()
    ignored = labels == terms.ignore_index
    check_range(labels.masked_fill(ignored, 0), terms.vocab_size, what="label")
    kernel = kernel_for(LOSS_KERNELS, options.kernel, logits)
    if kernel.name != "torch":
        rows = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        return logits_loss(*rows, terms, kernel).view(labels.shape)
    step = options.block_size or _rows_per_block(logits)
    rows = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), terms, step
    if terms.group is None:
        loss = cast(Tensor, _CrossEntropy.apply(*rows))
    else:
        loss = apply_outside_graph(_CrossEntropy, *rows)
    return loss.view(labels.shape)
