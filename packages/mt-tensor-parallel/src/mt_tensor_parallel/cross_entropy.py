"""Cross entropy over logits whose vocabulary is split over a group."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_tensor_parallel.collectives import Group, group_rank, group_size
from mt_tensor_parallel.embedding import check_range

__all__ = ["vocab_parallel_cross_entropy"]


def _rows_per_block(logits: Tensor) -> int:
    """Rows whose fp32 copy stays in cache on a CPU; an accelerator takes larger bites."""
    threads = torch.get_num_threads()
    elements = threads << 17 if logits.device.type == "cpu" else 1 << 27
    return max(threads, elements // max(1, logits.shape[-1]))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int, group: Group
    ) -> Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        count, size = logits.shape
        local = labels - group_rank(group) * size
        foreign = (local < 0) | (local >= size)
        local = local.masked_fill(foreign, 0)
        high = logits.new_empty(count, dtype=wide)
        total = torch.empty_like(high)
        step = _rows_per_block(logits)
        lowest = torch.finfo(wide).min  # of a shard that is -inf throughout
        for start in range(0, count, step):
            rows = slice(start, start + step)
            block = logits[rows].to(wide, copy=True)
            torch.clamp(block.amax(-1), min=lowest, out=high[rows])
            torch.sum(block.sub_(high[rows, None]).exp_(), -1, out=total[rows])
        target = logits.gather(1, local[:, None]).squeeze(1).to(wide).masked_fill(foreign, 0)
        if group is not None and group.size() > 1:
            own = high.clone()
            dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
            sums = torch.stack([total.mul_((own - high).exp_()), target])
            dist.all_reduce(sums, group=group)
            total, target = sums
        log_sum = high + total.log()
        ignored = labels == ignore_index
        ctx.save_for_backward(logits, log_sum, local, foreign, ignored)
        return (log_sum - target).masked_fill(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, log_sum, local, foreign, ignored = ctx.saved_tensors
        scale = grads[0].masked_fill(ignored, 0)
        out = torch.empty_like(logits)
        step = _rows_per_block(logits)
        hit = scale.masked_fill(foreign, 0).neg()
        for start in range(0, logits.shape[0], step):
            rows = slice(start, start + step)
            block = logits[rows].to(scale.dtype, copy=True)
            block.sub_(log_sum[rows, None]).exp_().mul_(scale[rows, None])
            block.scatter_add_(1, local[rows, None], hit[rows, None])
            out[rows] = block
        return out, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, *, group: Group = None, ignore_index: int = -100
) -> Tensor:
    """The cross entropy of each token, with the vocabulary split over ``group``.

    ``loss = log(sum_k exp(x_k - M)) - (x_label - M)`` with M the largest logit, as in Megatron-LM
    (Shoeybi et al. 2019). Forward runs two all-reduces of one or two numbers per token (MAX, then
    SUM of the exponentials' sums and of the label's logit); backward sends nothing. Everything is
    computed in fp32 (fp64 for fp64 logits), block of rows by block of rows, so no fp32 copy of the
    logits exists. Kept for backward: the logits themselves and one number per token.

    Args:
        logits: This rank's part of the logits.
        labels: Global token ids, or ``ignore_index``.
        group: ``None`` means the vocabulary is whole.
        ignore_index: Tokens with this label have loss 0 and no gradient.

    Shape:
        logits: [..., V / ranks]. labels: [...] int64. Returns [...], fp32 (fp64 for fp64 logits),
        equal on all ranks; gradients flow to the own part of the logits.

    Raises:
        ValueError: Shapes do not match, or a label is outside the vocabulary.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} do not match logits of shape "
            f"{tuple(logits.shape)}: they must have the shape of logits without the last dim"
        )
    vocab_size = logits.shape[-1] * group_size(group)
    check_range(labels.masked_fill(labels == ignore_index, 0), vocab_size, what="label")
    loss = _CrossEntropy.apply(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index, group
    )
    return cast(Tensor, loss).view(labels.shape)
