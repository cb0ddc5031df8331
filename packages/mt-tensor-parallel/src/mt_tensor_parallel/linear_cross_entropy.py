"""Head projection and cross entropy together, a block of tokens at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from mt_files import check_type, kernel_for
from mt_parallel_state import Group, apply_outside_graph
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_tensor_parallel.arguments import check_labels
from mt_tensor_parallel.autocast import as_autocast, check_dtypes
from mt_tensor_parallel.embedding import check_range
from mt_tensor_parallel.gemm import Gemm, checked_gemm
from mt_tensor_parallel.loss_kernels import LOSS_KERNELS, LossKernel
from mt_tensor_parallel.loss_terms import PLAIN_LOSS, LossOptions, LossTerms

_BLOCK = {"cpu": 1 << 23}  # logits: a few more rows than the products want
_LARGE_BLOCK = 1 << 29  # a gigabyte in bf16, for which products are as fast as whole


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    options: LossOptions = PLAIN_LOSS,
) -> Tensor:
    """Compute `linear_cross_entropy` with all logits at once on one rank, by torch's functions.

    It explains the arguments; `weight` is the whole head.

    Shape:
        hidden: [N, H]. weight: [V, H]. labels: [N]. bias: [V]. Returns a scalar, fp32 (fp64 for
        fp64).

    Raises:
        TypeError: `hidden` and `weight` differ in dtype, outside of autocast.
        ValueError: Shapes do not match, or an option is out of range.
    """
    _check(hidden, weight, labels, bias)
    terms = LossTerms(weight.shape[0], None, options)
    real = slice(terms.vocab_size)
    logits = F.linear(hidden, weight[real], None if bias is None else bias[real])
    logits = logits.to(torch.promote_types(hidden.dtype, torch.float32))
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    loss = F.cross_entropy(
        logits,
        labels,
        ignore_index=options.ignore_index,
        label_smoothing=terms.smoothing,
        reduction="sum",
    )
    if options.z_loss:
        square = logits.logsumexp(-1).square()
        loss = loss + options.z_loss * square.masked_fill(labels == options.ignore_index, 0).sum()
    return loss


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    options: LossOptions = PLAIN_LOSS,
    group: Group = None,
    gemm: Gemm | None = None,
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
        bias: This rank's part of the head's bias.
        options: What the loss is made of; by default the cross entropy alone. Rows of the head
            from `vocab_size` on are padding. A block has about 8 million logits by
            default, on a GPU 512 million.
        group: Ranks that share the vocabulary.
        gemm: Multiplies; `None` is `TorchGemm`. Each operand is made once.

    Shape:
        hidden: [N, H]. weight: [V / ranks, H]. labels: [N]. bias: [V / ranks]. Returns a scalar.

    Raises:
        TypeError: `hidden` and `weight` differ in dtype, outside of autocast.
        ValueError: Shapes do not match, a label is outside the vocabulary, or an option is out of
            range.
    """
    return _sums(hidden, weight, labels, bias, options, group, gemm)[0]


def linear_cross_entropy_and_z(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    options: LossOptions,
    bias: Tensor | None = None,
    group: Group = None,
    gemm: Gemm | None = None,
) -> tuple[Tensor, Tensor]:
    """The summed loss of all tokens but for its z-loss, and their squared log-sum-exp.

    For who reports both: `first + options.z_loss * second` is `linear_cross_entropy`, in value and
    gradient. As all gradients are made in one sweep over the logits, the first has that of both,
    and the second has none. It has the arguments and errors of `linear_cross_entropy`.

    Shape:
        As `linear_cross_entropy`. Returns two scalars.
    """
    total, z = _sums(hidden, weight, labels, bias, options, group, gemm)
    return total - options.z_loss * z, z


def _sums(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    options: LossOptions,
    group: Group,
    gemm: Gemm | None,
) -> tuple[Tensor, Tensor]:
    """The summed loss with all terms, and the summed square of the log-sum-exp without gradient."""
    _check(hidden, weight, labels, bias)
    terms, labels = LossTerms(weight.shape[0], group, options), labels.long()
    ignored = labels == terms.ignore_index
    check_range(labels.masked_fill(ignored, 0), terms.vocab_size, what="label")
    logits = _BLOCK.get(hidden.device.type, _LARGE_BLOCK)
    block_size = options.block_size or max(512, logits // weight.shape[0])
    gemm = checked_gemm(gemm)
    in_graph = torch.compiler.is_compiling() and terms.group is None and gemm.is_torch
    if in_graph:  # where blocks would be unrolled
        block_size = max(1, hidden.shape[0])
    how = _How(
        gemm=gemm,
        terms=terms,
        kernel=kernel_for(LOSS_KERNELS, options.kernel, hidden),
        block_size=block_size,
        grad_enabled=torch.is_grad_enabled(),
    )
    floats = (None if x is None else as_autocast(x) for x in (hidden, weight, bias))
    if in_graph:
        found = _LinearCrossEntropy.apply(*floats, labels, how)
    else:
        found = apply_outside_graph(_LinearCrossEntropy, *floats, labels, how)
    return cast("tuple[Tensor, Tensor]", found)


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    check_type("hidden", hidden, Tensor)
    check_type("weight", weight, Tensor)
    check_labels(labels, "labels")
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
    if bias is not None:
        check_type("bias", bias, Tensor)
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"bias {tuple(bias.shape)} must have one number for each of the head's "
                f"{weight.shape[0]} rows on this rank"
            )
        check_dtypes(hidden, bias, "hidden")


@dataclass(frozen=True, kw_only=True)
class _How:
    """What stays the same over the blocks.

    Attributes:
        gemm: Multiplies.
        terms: Of the loss.
        kernel: Turns logits into losses and gradient.
        block_size: Tokens per block.
        grad_enabled: Whether gradients may be wanted.
    """

    gemm: Gemm
    terms: LossTerms
    kernel: LossKernel
    block_size: int
    grad_enabled: bool


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, how: _How
    ) -> tuple[Tensor, Tensor]:
        gemm, size = how.gemm, how.block_size
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        z = torch.zeros_like(total)
        needs_hidden, needs_weight, needs_bias = (
            how.grad_enabled and needed for needed in ctx.needs_input_grad[:3]
        )
        wants_grad = needs_hidden or needs_weight or needs_bias
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_bias = None
        if bias is not None and needs_bias:
            grad_bias = torch.zeros_like(bias, dtype=wide)
        # Blocks are summed in fp32 so that their number does not change the precision.
        single = 0 < hidden.shape[0] <= size
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight and not single else None
        matrix = gemm.operand(weight, "weight")
        for start in range(0, hidden.shape[0], size):
            rows = slice(start, start + size)
            # Ignored tokens are zeroed on the H side of all products, not over the logits.
            counts = (labels[rows] != how.terms.ignore_index).to(hidden.dtype).unsqueeze(1)
            x = gemm.operand(hidden[rows] * counts, "input")
            logits = gemm.forward(x, matrix, bias)
            loss, square = _block_loss(logits, labels[rows], how, wants_grad=wants_grad)
            total, z = total + loss, z + square
            if not wants_grad:
                continue
            if grad_bias is not None:
                grad_bias += logits.t().mv(counts.squeeze(1).to(logits.dtype))
            grad_logits = gemm.operand(logits, "grad")
            if grad_hidden is not None:
                torch.mul(gemm.dgrad(grad_logits, matrix), counts, out=grad_hidden[rows])
            if grad_weight is not None:
                gemm.wgrad_into(grad_logits, x, grad_weight, accumulate=True)
            elif needs_weight:
                grad_weight = gemm.wgrad(grad_logits, x)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.mark_non_differentiable(z)
        return total, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        scaled = [None if g is None else _scaled(g, grads[0], dtype) for g, dtype in saved]
        return (*scaled, None, None)


def _scaled(grad: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`grad * scale`, multiplied in fp32 and rounded once.

    The scale is one over the number of tokens. Rounded to bf16, it would put a common factor of up
    to 1.004 on every gradient of the model.
    """
    if grad.device.type != "cpu":  # where a tensor without dims is rounded to the other's dtype
        scale = scale.expand((1,) * grad.dim())
    return torch.mul(grad, scale, out=torch.empty_like(grad, dtype=dtype))


def _block_loss(
    logits: Tensor, labels: Tensor, how: _How, *, wants_grad: bool
) -> tuple[Tensor, Tensor]:
    """Return the summed loss and square of a block, and turn its logits into their gradient.

    Also those of ignored tokens, which have no loss.

    Shape:
        logits: [N, V / ranks]; labels: [N]. Returns two scalars.
    """
    size, terms = how.block_size, how.terms
    # On a CPU the softmax takes fewer rows at a time than the products, to stay in cache.
    in_cache = how.kernel.in_cache and logits.device.type == "cpu" and terms.group is None
    if in_cache and not torch.compiler.is_compiling():
        size = max(16, (1 << 19) // logits.shape[1])
    losses: list[Tensor] = []
    squares: list[Tensor] = []
    for part, own in zip(logits.split(size), labels.split(size), strict=True):
        loss, square, probs = how.kernel.run(part[:, : terms.columns], own, terms)
        losses.append(loss)
        squares.append(square)
        if wants_grad:
            if part.dtype != probs.dtype or torch.compiler.is_compiling():  # else it is in place
                part[:, : terms.columns] = probs
            part[:, terms.columns :] = 0
    return torch.stack(losses).sum(), torch.stack(squares).sum()
