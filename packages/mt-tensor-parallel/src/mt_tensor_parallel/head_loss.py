"""Head projection and cross entropy together, a block of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from mt_files import check_type
from mt_fusions import LogitLoss, LossOptions, TokenLosses
from mt_parallel_state import Group, apply_outside_graph
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_tensor_parallel.autocast import as_autocast, check_dtypes
from mt_tensor_parallel.gemm import Gemm, checked_gemm

_PLAIN_LOSS = LossOptions()
_BLOCK = {"cpu": 1 << 23}  # logits: a few more rows than the products want
_LARGE_BLOCK = 1 << 29  # a gigabyte in bf16, for which products are as fast as whole
Grads = Sequence[Tensor | None]  # of hidden, weight and bias


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    options: LossOptions = _PLAIN_LOSS,
    group: Group = None,
    gemm: Gemm | None = None,
) -> Tensor:
    """Compute the losses of `hidden @ weight.T + bias` with no more than a block of logits.

    For the sum, forward also makes the gradients, block by block: three products, and the [N, V]
    logits never go through memory. Backward scales them. Unreduced, where a gradient arrives for
    each token, backward makes the logits of each block again: four products.

    With a group, forward runs one MAX and one SUM all-reduce of per-token values for each block;
    backward runs none: the gradient of `hidden` is **this rank's part only**. Pass `hidden` through
    `copy_to_group` (`all_gather` under sequence parallelism), whose backward sums the parts.

    Softmax and losses are in fp32 (fp64 for fp64), and so are the weight's sum over blocks and the
    scaling in backward; gradients are rounded after that. A frozen weight gets no gradient. A
    compiled graph on one rank takes all tokens as one block.

    Args:
        hidden: Final hidden states, the same on all ranks of the group. The values of ignored
            tokens do not matter, even NaN.
        weight: This rank's rows of the head.
        labels: Labels of the whole vocabulary, or `ignore_index` for tokens that do not count.
        bias: This rank's part of the head's bias.
        options: The terms of the loss and its reduction; by default the sum of the cross entropy
            alone. A block has about 8 million logits by default, and 512 million on a GPU.
        group: The ranks that share the vocabulary.
        gemm: Multiplies; None is `TorchGemm`. Each operand is made once for each pass.

    Shape:
        hidden: [..., H]. weight: [V / ranks, H]. labels: [...]. bias: [V / ranks]. Returns a
        scalar, or [...] unreduced.

    Raises:
        TypeError: An argument is no tensor of the right kind, or `hidden` and `weight` differ in
            dtype outside of autocast.
        ValueError: Shapes do not match, a label is outside the vocabulary, or an option is out of
            range.
    """
    return _losses(hidden, weight, labels, bias, options, group, gemm)[0]


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
    """Compute the loss without its z-loss, and the squares of the log-sum-exp, both reduced.

    This is for reporting both: `first + options.z_loss * second` is `linear_cross_entropy`, in
    value and gradient. One sweep over the logits makes all gradients, so the first number carries
    the gradient of both, and the second has none. Arguments and errors are as in
    `linear_cross_entropy`.

    Shape:
        As `linear_cross_entropy`, which returns the first of the two.
    """
    total, z = _losses(hidden, weight, labels, bias, options, group, gemm)
    return total - options.z_loss * z, z


def block_rows(hidden: Tensor, weight: Tensor) -> int:
    """Return the number of tokens whose logits make a block."""
    logits = _BLOCK.get(hidden.device.type, _LARGE_BLOCK)
    return max(512, logits // len(weight))


def _losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    options: LossOptions,
    group: Group,
    gemm: Gemm | None,
) -> tuple[Tensor, Tensor]:
    """Return the losses, and without a gradient the squared log-sum-exp, both reduced."""
    _check(hidden, weight, labels, bias)
    check_type("options", options, LossOptions)
    gemm = checked_gemm(gemm)
    loss = LogitLoss(labels, hidden, len(weight), options, group)
    in_graph = torch.compiler.is_compiling() and loss.group is None and gemm.is_torch
    size = options.block_size or block_rows(hidden, weight)
    rows = hidden.flatten(0, -2) if hidden.dim() > 1 else hidden.unsqueeze(0)
    if in_graph:  # which would unroll the blocks
        size = max(1, len(rows))
    sweep = _Sweep(gemm=gemm, loss=loss, size=size, keeps_gradients=torch.is_grad_enabled())
    operands = (None if x is None else as_autocast(x) for x in (rows, weight, bias))
    function = _Unreduced if options.reduction == "none" else _Summed
    if in_graph:
        found = function.apply(*operands, sweep)
    else:
        found = apply_outside_graph(function, *operands, sweep)
    losses, squares = cast("tuple[Tensor, Tensor]", found)
    if options.reduction == "none":
        return losses.view(labels.shape), squares.view(labels.shape)
    if options.reduction == "mean":
        count = loss.counts.sum()
        return losses / count, squares / count
    return losses, squares


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    check_type("hidden", hidden, Tensor)
    check_type("weight", weight, Tensor)
    check_type("labels", labels, Tensor)
    if (
        hidden.dim() < 1
        or labels.shape != hidden.shape[:-1]
        or weight.dim() != 2
        or weight.shape[1:] != hidden.shape[-1:]
    ):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and labels "
            f"{tuple(labels.shape)} must be [..., H], [V / ranks, H] and [...]"
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
class _Sweep:
    """One pass over the logits of all tokens, block by block.

    Attributes:
        gemm: Multiplies.
        loss: The loss of the logits.
        size: Number of tokens of a block.
        keeps_gradients: Whether gradients may be wanted.
    """

    gemm: Gemm
    loss: LogitLoss
    size: int
    keeps_gradients: bool

    def run(
        self,
        tensors: tuple[Tensor, Tensor, Tensor | None],
        needed: Sequence[bool],
        fill: Callable[[Tensor, slice], None],
    ) -> Grads:
        """Make each block's logits and have them filled with their gradient; return the gradients.

        Args:
            tensors: Hidden states, weight and bias.
            needed: Whether each of them needs a gradient.
            fill: Turns the logits of some rows into their gradient.
        """
        (hidden, weight, bias), gemm = tensors, self.gemm
        wide = torch.promote_types(hidden.dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden) if needed[0] else None
        # Blocks are summed in fp32, so that their number does not change the precision.
        single = 0 < len(hidden) <= self.size
        grad_weight = torch.zeros_like(weight, dtype=wide) if needed[1] and not single else None
        grad_bias = None
        if bias is not None and needed[2]:
            grad_bias = torch.zeros_like(bias, dtype=wide)
        matrix = gemm.operand(weight, "weight")
        for start in range(0, len(hidden), self.size):
            rows = slice(start, min(start + self.size, len(hidden)))
            # Ignored tokens are zeroed on the H side of all products, not over the logits.
            counts = self.loss.counts[rows]
            x = gemm.operand(hidden[rows].masked_fill(~counts.unsqueeze(1), 0), "input")
            logits = gemm.forward(x, matrix, bias)
            fill(logits, rows)
            if grad_bias is not None:
                grad_bias += logits.t().mv(counts.to(logits.dtype))
            if not (needed[0] or needed[1]):
                continue
            grad = gemm.operand(logits, "grad")
            if grad_hidden is not None:
                weights = counts.to(hidden.dtype).unsqueeze(1)
                torch.mul(gemm.dgrad(grad, matrix), weights, out=grad_hidden[rows])
            if grad_weight is not None:
                gemm.wgrad_into(grad, x, grad_weight, accumulate=True)
            elif needed[1]:
                grad_weight = gemm.wgrad(grad, x)
        return grad_hidden, grad_weight, grad_bias

    def losses(
        self, tensors: tuple[Tensor, Tensor, Tensor | None], needed: Sequence[bool]
    ) -> tuple[TokenLosses, Grads]:
        """Return the losses of all tokens, and the needed gradients of their sum."""
        blocks: list[TokenLosses] = []

        def fill(logits: Tensor, rows: slice) -> None:
            blocks.append(self.loss.losses_(logits, rows, wants_grad=any(needed)))

        grads = self.run(tensors, needed, fill)
        if not blocks:
            nothing = tensors[0].new_empty(
                0, dtype=torch.promote_types(tensors[0].dtype, torch.float32)
            )
            return TokenLosses(nothing, nothing, nothing), grads
        return TokenLosses(*(torch.cat(parts) for parts in zip(*blocks, strict=True))), grads


def _squares(losses: TokenLosses, sweep: _Sweep) -> Tensor:
    """Return the squared log-sum-exp of the tokens that count, or zeros if there is no z-loss."""
    if not sweep.loss.options.z_loss:
        return torch.zeros_like(losses.lse)
    return torch.where(sweep.loss.counts, losses.lse.square(), 0)


class _Summed(torch.autograd.Function):
    """The sums over all tokens, whose gradients are made in forward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, sweep: _Sweep
    ) -> tuple[Tensor, Tensor]:
        tensors = hidden, weight, bias
        needed = [sweep.keeps_gradients and need for need in ctx.needs_input_grad[:3]]
        losses, grads = sweep.losses(tensors, needed)
        ctx.dtypes = [None if x is None else x.dtype for x in tensors]
        ctx.save_for_backward(*grads)
        squares = _squares(losses, sweep).sum()
        ctx.mark_non_differentiable(squares)
        return losses.loss.sum(), squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return (*(None if g is None else _scaled(g, grads[0], dtype) for g, dtype in saved), None)


class _Unreduced(torch.autograd.Function):
    """The losses of all tokens, whose logits are made again in backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, sweep: _Sweep
    ) -> tuple[Tensor, Tensor]:
        losses, _ = sweep.losses((hidden, weight, bias), [False] * 3)
        ctx.sweep = sweep
        ctx.save_for_backward(hidden, weight, bias, *losses)
        squares = _squares(losses, sweep)
        ctx.mark_non_differentiable(squares)
        return losses.loss, squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        *tensors, loss, lse, own = ctx.saved_tensors
        losses, sweep = TokenLosses(loss, lse, own), ctx.sweep

        def fill(logits: Tensor, rows: slice) -> None:
            sweep.loss.gradient_(logits, rows, losses, grads[0])

        found = sweep.run(tuple(tensors), ctx.needs_input_grad[:3], fill)
        typed = zip(found, tensors, strict=True)
        return (*(None if g is None else g.to(x.dtype) for g, x in typed), None)


def _scaled(grad: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `grad * scale`, multiplied in fp32 and rounded once.

    The scale is one over the number of tokens. Rounded to bf16, it would put a common factor of up
    to 1.004 on every gradient of the model.
    """
    if grad.device.type != "cpu":  # where a tensor without dims is rounded to the other's dtype
        scale = scale.expand((1,) * grad.dim())
    return torch.mul(grad, scale, out=torch.empty_like(grad, dtype=dtype))
