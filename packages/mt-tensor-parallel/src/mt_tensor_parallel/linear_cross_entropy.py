"""Head projection and cross entropy together, a block of tokens at a time."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_tensor_parallel.autocast import as_autocast, check_dtypes
from mt_tensor_parallel.collectives import Group, apply_outside_graph, group_size
from mt_tensor_parallel.embedding import check_range
from mt_tensor_parallel.loss_terms import LossTerms

__all__ = ["IGNORE_INDEX", "linear_cross_entropy", "linear_cross_entropy_reference"]

IGNORE_INDEX = -100


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
) -> Tensor:
    """`linear_cross_entropy` with all logits at once, on one rank, by torch's functions.

    Args:
        hidden: Final hidden states.
        weight: The whole head.
        labels: Token ids, or `ignore_index` for tokens that do not count.
        ignore_index: Such tokens have neither loss nor gradient.
        label_smoothing: Share of the target moved to the other tokens (see `LossTerms`).
        z_loss: Weight of the squared log-sum-exp.
        vocab_size: Real tokens; further rows of the head are padding. `None` means all.

    Shape:
        hidden: [N, H]. weight: [V, H]. labels: [N]. Returns a scalar, fp32 (fp64 for fp64).

    Raises:
        TypeError: `hidden` and `weight` differ in dtype, outside of autocast.
        ValueError: Shapes do not match, or an option is out of range.
    """
    _check(hidden, weight, labels)
    terms = LossTerms.of(
        weight.shape[0],
        None,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        vocab_size=vocab_size,
    )
    logits = F.linear(hidden, weight[: terms.vocab_size])
    logits = logits.to(torch.promote_types(hidden.dtype, torch.float32))
    loss = F.cross_entropy(
        logits,
        labels,
        ignore_index=ignore_index,
        label_smoothing=terms.smoothing,
        reduction="sum",
    )
    if z_loss:
        square = logits.logsumexp(-1).square()
        loss = loss + z_loss * square.masked_fill(labels == ignore_index, 0).sum()
    return loss


def linear_cross_entropy(  # noqa: PLR0913 - the terms of a loss, by keyword
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    group: Group = None,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    block_size: int | None = None,
) -> Tensor:
    """The summed loss of all tokens, without ever holding more than a block of logits.

    Gradients are computed in forward, block by block, and scaled in backward, so the [N, V] logits
    neither go through memory nor stay there between the passes. With a group, each block
    does one MAX and one SUM all-reduce of per-token values in forward; backward does none: the
    gradient of `hidden` is **this rank's part only**. Pass `hidden` through `copy_to_group`
    (`all_gather` under sequence parallelism), whose backward sums the parts. Softmax and losses
    are in fp32 (fp64 for fp64), and so are the weight's sum over blocks and the scaling in
    backward, after which gradients are rounded. No gradient is computed for a frozen weight. A
    compiled graph on one rank takes all tokens as one block.

    Args:
        hidden: Final hidden states, replicated over the group.
        weight: This rank's rows of the head.
        labels: Global token ids, or `ignore_index` for tokens that do not count.
        group: Ranks that share the vocabulary.
        ignore_index: Such tokens have neither loss nor gradient.
        label_smoothing: Share of the target moved to the other tokens (see `LossTerms`).
        z_loss: Weight of the squared log-sum-exp.
        vocab_size: Real tokens; further rows of the head are padding. `None` means all.
        block_size: Tokens per block, at least 1; by default about 4 million logits.

    Shape:
        hidden: [N, H]. weight: [V / ranks, H]. labels: [N]. Returns a scalar.

    Raises:
        TypeError: `hidden` and `weight` differ in dtype, outside of autocast.
        ValueError: Shapes do not match, a label is outside the vocabulary, or an option is out of
            range.
    """
    _check(hidden, weight, labels)
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size={block_size} must be at least 1, or None for the default")
    terms = LossTerms.of(
        weight.shape[0],
        group,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        vocab_size=vocab_size,
    )
    check_range(labels.masked_fill(labels == ignore_index, 0), terms.vocab_size, what="label")
    if block_size is None:
        block_size = max(256, (1 << 22) // weight.shape[0])
    operands = as_autocast(hidden), as_autocast(weight), labels
    if group_size(group) > 1:
        rest = group, terms, block_size, torch.is_grad_enabled()
        return apply_outside_graph(_LinearCrossEntropy, *operands, *rest)
    if torch.compiler.is_compiling():  # where blocks would be unrolled
        block_size = max(1, hidden.shape[0])
    rest = None, terms, block_size, torch.is_grad_enabled()
    return cast(Tensor, _LinearCrossEntropy.apply(*operands, *rest))


def _check(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    if (
        hidden.dim() != 2
        or labels.shape != hidden.shape[:1]
        or weight.shape[1:] != hidden.shape[1:]
    ):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and labels "
            f"{tuple(labels.shape)} must be [N, H], [V / ranks, H] and [N]"
        )
    check_dtypes(hidden, weight, "hidden")


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 - autograd.Function takes no keywords
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        group: Group,
        terms: LossTerms,
        block_size: int,
        grad_enabled: bool,  # noqa: FBT001 - autograd.Function takes no keywords
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        needs_hidden, needs_weight = (
            grad_enabled and needed for needed in ctx.needs_input_grad[:2]
        )
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Blocks are summed in fp32 so that their number does not change the precision.
        single = 0 < hidden.shape[0] <= block_size
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight and not single else None
        # On a CPU the softmax takes fewer rows at a time than the products, to stay in cache.
        cached = hidden.device.type == "cpu" and group is None and not torch.compiler.is_compiling()
        rows_in_cache = max(16, (1 << 19) // weight.shape[0]) if cached else block_size
        for start in range(0, hidden.shape[0], block_size):
            rows = slice(start, start + block_size)
            logits = F.linear(hidden[rows], weight)
            for part, part_labels in zip(
                logits.split(rows_in_cache), labels[rows].split(rows_in_cache), strict=True
            ):
                loss, grad_logits = _block_loss(part, part_labels, group, terms)
                total += loss
                if needs_hidden or needs_weight:
                    if part.dtype != wide or torch.compiler.is_compiling():  # else it is in place
                        part[:, : terms.columns] = grad_logits
                    part[:, terms.columns :] = 0
            # Ignored tokens are zeroed on the H side of both products, not over the logits.
            counts = (labels[rows] != terms.ignore_index).to(hidden.dtype).unsqueeze(1)
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[rows])
                grad_hidden[rows] *= counts
            if needs_weight:
                block = logits.t().mm(hidden[rows] * counts)
                grad_weight = block if grad_weight is None else grad_weight.add_(block)
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        scaled = [None if g is None else _scaled(g, grads[0], dtype) for g, dtype in saved]
        return (*scaled, None, None, None, None, None)


def _scaled(grad: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`grad * scale`, multiplied in fp32 and rounded once.

    The scale is one over the number of tokens. Rounded to bf16, it would put a common factor of up
    to 1.004 on every gradient of the model.
    """
    if grad.device.type != "cpu":  # where a tensor without dims is rounded to the other's dtype
        scale = scale.expand((1,) * grad.dim())
    return torch.mul(grad, scale, out=torch.empty_like(grad, dtype=dtype))


def _block_loss(
    logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None, terms: LossTerms
) -> tuple[Tensor, Tensor]:
    """Summed loss of a block, and the gradient of its logits (also for ignored tokens).

    fp32 and fp64 logits are overwritten, by their gradient outside of compiled graphs.

    Shape:
        logits: [N, V / ranks]; labels: [N]. Returns a scalar and [N, terms.columns].
    """
    wide = logits[:, : terms.columns].to(torch.promote_types(logits.dtype, torch.float32))
    counts = labels != terms.ignore_index
    local = labels - terms.first
    mine = counts & (local >= 0) & (local < terms.columns)
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
    if group is not None:
        largest = lse.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        parts = [(lse - largest).exp_(), target, *([] if sums is None else [sums])]
        shared = torch.stack(parts)
        dist.all_reduce(shared, group=group)
        whole = shared[0].log_().add_(largest)
        probs.mul_((lse - whole).exp_().unsqueeze(1))
        lse, target, sums = whole, shared[1], None if sums is None else shared[2]
    loss = torch.where(counts, terms.loss(lse, target, sums), 0).sum()
    if terms.columns:
        terms.grad_(probs, lse, column, mine)
    return loss, probs
