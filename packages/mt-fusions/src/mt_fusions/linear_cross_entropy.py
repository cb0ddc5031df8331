"""Head projection and cross entropy together, with a block of logits at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from mt_files import check_type
from torch import Tensor

from mt_fusions.arguments import check_floating
from mt_fusions.blocks import as_rows, wide_dtype
from mt_fusions.cross_entropy import CROSS_ENTROPY_KERNELS
from mt_fusions.kernels import AUTO, kernel_for
from mt_fusions.linear_loss import linear_loss
from mt_fusions.logits import add_product, block_size, blocks_of, logits_of, sum_dtype
from mt_fusions.loss import PLAIN_LOSS, LossOptions, Terms, check_labels, local_labels, loss_of
from mt_fusions.operator import operator

Grads = tuple[Tensor, Tensor, Tensor]  # of x, weight and bias; empty where not wanted


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    options: LossOptions = PLAIN_LOSS,
    group: dist.ProcessGroup | None = None,
    kernel: str = AUTO,
) -> Tensor:
    """`cross_entropy(x @ weight.T + bias, labels)` that never holds more than a block of logits.

    The products are in the dtype of `x`, or autocast's, and so are the logits of a block; softmax
    and loss are in fp32 (fp64 for fp64), and so is the sum over blocks of the weight's gradient.
    Where the loss is a scalar, forward makes the wanted gradients too, block by block, and backward
    scales them in fp32: three products, as of whole logits. Unreduced, where a gradient arrives for
    each token, backward keeps `x`, the weight and a number per token, and multiplies each block
    again. With a group, forward runs the all-reduces of `cross_entropy`, for each block where it
    makes gradients, and backward none: the gradient of `x` is **this rank's part only**, to be
    summed over the group by whoever copied `x` to it.

    Args:
        x: Final hidden states, the same on all ranks of the group. What ignored tokens hold, even
            NaN, does not matter.
        weight: This rank's rows of the head.
        labels: Of the whole vocabulary.
        bias: This rank's part of the head's bias.
        options: What the loss is made of; by default the mean of the cross entropy alone.
        group: The ranks that share the vocabulary; None for one that is not split.
        kernel: "auto", or one of "cpu", "triton" and "reference" by name. The last one takes all
            tokens as one block.

    Shape:
        x: [..., H]; weight: [V / ranks, H]; labels: [...]; bias: [V / ranks]. Returns a scalar, or
        [...] unreduced, in fp32 (fp64 for fp64), the same on all ranks.

    Raises:
        TypeError: Something is no tensor of the right kind, or dtypes differ outside of autocast.
        ValueError: Shapes, labels or options do not fit, or the kernel does not serve.
    """
    x, weight, bias = (_as_autocast(y) for y in (x, weight, bias))
    _check(x, weight, bias)
    check_type("options", options, LossOptions)
    check_labels(labels, "x", x)
    own = local_labels(labels, weight.shape[0], group, options)
    rows = as_rows(x).masked_fill(~own.counts.unsqueeze(1), 0)
    if options.reduction != "none":
        loss = linear_loss(rows, weight, bias, own, options, group, kernel)
        return loss if options.reduction == "sum" else loss / own.counts.sum()
    wants_total = options.label_smoothing > 0
    found = _forward(rows, weight, bias, own.local, own.columns, wants_total, kernel)
    return loss_of(found, own, group, options).view(labels.shape)


def _as_autocast(x: object) -> Any:
    """A tensor in the dtype that autocast gives the operands of a product."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    device = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_floating("x", x)
    others = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    for name, other in others.items():
        check_floating(name, other)
        if other.dtype != x.dtype:
            raise TypeError(
                f"{name} is {other.dtype} and x {x.dtype}; convert one of them, or run under "
                "torch.autocast"
            )
        if other.device != x.device:
            raise ValueError(f"{name} is on {other.device}, but x on {x.device}; use one device")
    if not x.dim() or weight.dim() != 2 or weight.shape[1] != x.shape[-1] or not weight.shape[0]:
        raise ValueError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)} must be [..., H] and [V, H]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias {tuple(bias.shape)} must have a number for each of the {weight.shape[0]} rows "
            "of the weight"
        )


def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, columns: int, *how: Any
) -> Terms:
    wants_total, name = how
    kernel = kernel_for(CROSS_ENTROPY_KERNELS, name, x)
    out = _fake(x, weight, bias, labels, columns, *how)
    for rows in blocks_of(len(x), block_size(kernel, x, weight)):
        block = logits_of(x[rows], weight, bias)
        found = kernel.forward(block, labels[rows], columns, wants_total=wants_total)
        for into, part in zip(out[: 2 + wants_total], found, strict=False):
            into[rows] = part
    return out


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, columns: int, *how: Any
) -> Terms:
    lse = x.new_empty(x.shape[0], dtype=wide_dtype(x.dtype))
    return lse, torch.empty_like(lse), torch.empty_like(lse) if how[0] else lse.new_empty(0)


def _run_backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, lse: Tensor, *how: Any
) -> Grads:
    *grads, columns, wanted, name = how
    kernel = kernel_for(CROSS_ENTROPY_KERNELS, name, x)
    size = block_size(kernel, x, weight)
    dtype = sum_dtype(x.dtype, len(x), size)
    grad_x = x.new_empty(x.shape if wanted[0] else 0)
    grad_weight = weight.new_zeros(weight.shape if wanted[1] else 0, dtype=dtype)
    grad_bias = weight.new_zeros(len(weight) if wanted[2] else 0, dtype=dtype)
    for rows in blocks_of(len(x), size):
        part = x[rows]
        block = logits_of(part, weight, bias)
        given = tuple(g[rows] if len(g) else g for g in grads)
        kernel.backward(block, block, labels[rows], lse[rows], given, columns)
        if wanted[0]:
            torch.mm(block, weight, out=grad_x[rows])
        if wanted[1]:
            add_product(grad_weight, block.t(), part)
        if wanted[2]:
            grad_bias += block.sum(0, dtype=grad_bias.dtype)
    return grad_x, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)


def _fake_backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, lse: Tensor, *how: Any
) -> Grads:
    wanted = how[-2]
    return (
        x.new_empty(x.shape if wanted[0] else 0),
        weight.new_empty(weight.shape if wanted[1] else 0),
        weight.new_empty(len(weight) if wanted[2] else 0),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Terms) -> None:
    x, weight, bias, labels, ctx.columns, ctx.wants_total, ctx.kernel = inputs
    ctx.save_for_backward(x, weight, bias, labels, output[0])


def _gradient(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    total = grads[2] if ctx.wants_total else tensors[-1].new_empty(0)
    wanted = [bool(needed) for needed in ctx.needs_input_grad[:3]]
    found = _backward(*tensors, *grads[:2], total, ctx.columns, wanted, ctx.kernel)
    return (
        *(g if needed else None for g, needed in zip(found, wanted, strict=True)),
        *(None for _ in range(4)),
    )


_backward = operator(
    "linear_cross_entropy_backward",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor labels, Tensor lse, Tensor grad_lse, "
    "Tensor grad_target, Tensor grad_total, int columns, bool[] wanted, str kernel) "
    "-> (Tensor, Tensor, Tensor)",
    _run_backward,
    fake=_fake_backward,
)
_forward = operator(
    "linear_cross_entropy",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor labels, int columns, bool wants_total, "
    "str kernel) -> (Tensor, Tensor, Tensor)",
    _run,
    fake=_fake,
    setup=_setup,
    gradient=_gradient,
)
