"""Head projection and cross entropy together, a block of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, ignore_index: int = IGNORE_INDEX
) -> Tensor:
    """Sum over tokens of `-log softmax(weight h)[label]`, with all logits at once, on one rank."""
    logits = F.linear(hidden, weight).to(torch.promote_types(hidden.dtype, torch.float32))
    return F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    block_size: int | None = None,
) -> Tensor:
    """`linear_cross_entropy_reference` without ever holding more than a block of logits.

    Gradients are computed in forward, block by block, and scaled in backward, so the [N, V] logits
    neither go through memory nor stay there between the passes. With a group, each block
    does one MAX and one SUM all-reduce of per-token values in forward; backward does none: the
    gradient of `hidden` is this rank's part, to be summed by what produced `hidden`
    (`copy_to_group` or `all_gather`). Softmax and losses are in fp32 (fp64 for fp64).

    Args:
        hidden: final hidden states, replicated over the group.
        weight: this rank's rows of the head.
        labels: global token ids, or -100 for tokens that do not count.
        group: ranks that share the vocabulary.
        block_size: tokens per block; by default about 4 million logits.

    Shape:
        hidden: [N, H]; weight: [V / tp, H]; labels: [N]. Returns a scalar.
    """
    if torch.compiler.is_compiling():
        if group is None:
            return linear_cross_entropy_reference(hidden, weight, labels)
        # Not a decorator: that would import dynamo with this module.
        untraced = cast("Callable[..., Tensor]", torch.compiler.disable(_in_blocks))
        return untraced(hidden, weight, labels, group, block_size)
    return _in_blocks(hidden, weight, labels, group, block_size)


def _in_blocks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    group: dist.ProcessGroup | None,
    block_size: int | None,
) -> Tensor:
    if block_size is None:
        block_size = max(256, (1 << 22) // weight.shape[0])
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    args = (hidden, weight, labels, group, block_size, needs_grad)
    return _LinearCrossEntropy.apply(*args)  # pyright: ignore[reportReturnType]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        group: dist.ProcessGroup | None,
        block_size: int,
        needs_grad: bool,  # noqa: FBT001 - autograd.Function takes no keywords
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        first = weight.shape[0] * dist.get_rank(group) if group is not None else 0
        single = hidden.shape[0] <= block_size
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        # On a CPU the softmax takes fewer rows at a time than the products, to stay in cache.
        alone_on_cpu = hidden.device.type == "cpu" and group is None
        rows_in_cache = max(16, (1 << 19) // weight.shape[0]) if alone_on_cpu else block_size
        # Blocks are summed in fp32 so that their number does not change the precision.
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_grad and not single else None
        for start in range(0, hidden.shape[0], block_size):
            rows = slice(start, start + block_size)
            logits = F.linear(hidden[rows], weight)
            for part, part_labels in zip(
                logits.split(rows_in_cache), labels[rows].split(rows_in_cache), strict=True
            ):
                loss, grad_logits = _block_loss(part, part_labels, first, group)
                total += loss
                if grad_hidden is not None and grad_logits is not part:
                    part.copy_(grad_logits)
            if grad_hidden is None:
                continue
            # Ignored tokens are zeroed on the H side of both products, not over the logits.
            counts = (labels[rows] != IGNORE_INDEX).to(hidden.dtype).unsqueeze(1)
            torch.mm(logits, weight, out=grad_hidden[rows])
            grad_hidden[rows] *= counts
            block_grad = logits.t().mm(hidden[rows] * counts)
            grad_weight = block_grad if grad_weight is None else grad_weight.add_(block_grad)
        if grad_hidden is not None and grad_weight is not None:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grads[0]
        needs = ctx.needs_input_grad
        return (
            grad_hidden * scale.to(grad_hidden.dtype) if needs[0] else None,
            grad_weight * scale.to(grad_weight.dtype) if needs[1] else None,
            None,
            None,
            None,
            None,
        )


def _block_loss(
    logits: Tensor, labels: Tensor, first: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Summed loss of a block, and softmax minus the one-hot label (also for ignored tokens).

    fp32 and fp64 logits are overwritten.

    Shape:
        logits: [N, V / tp]; labels: [N]; first: global id of column 0.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counts = labels != IGNORE_INDEX
    local = labels - first
    mine = counts & (local >= 0) & (local < logits.shape[1])
    column = torch.where(mine, local, 0).unsqueeze(1)
    target = torch.where(mine, wide.gather(1, column).squeeze(1), 0)
    largest = wide.amax(dim=-1)
    probs = torch.softmax(wide, dim=-1, out=wide)  # row by row, so it may be in place
    # log-sum-exp from the largest probability, which is at least 1/V: no second pass of exp.
    lse = largest - probs.amax(dim=-1).log_()
    if group is not None:
        largest = lse.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shared = torch.stack(((lse - largest).exp_(), target))
        dist.all_reduce(shared, group=group)
        whole = shared[0].log_().add_(largest)
        probs.mul_((lse - whole).exp_().unsqueeze(1))
        lse, target = whole, shared[1]
    loss = torch.where(counts, lse - target, 0).sum()
    probs.scatter_add_(1, column, -mine.to(probs.dtype).unsqueeze(1))
    return loss, probs
