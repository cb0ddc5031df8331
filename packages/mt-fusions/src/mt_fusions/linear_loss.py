"""The summed loss of a head's logits, whose gradients are made beside it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mt_fusions.blocks import wide_dtype
from mt_fusions.cross_entropy import CROSS_ENTROPY_KERNELS
from mt_fusions.kernels import Kernel, kernel_for
from mt_fusions.logits import add_product, block_size, blocks_of, logits_of, sum_dtype
from mt_fusions.loss import (
    Labels,
    LossOptions,
    Terms,
    joined,
    token_losses,
    token_slopes,
)
from mt_fusions.operator import operator

Found = tuple[Tensor, Tensor, Tensor, Tensor]  # loss, gradients; these empty where not wanted


def linear_loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Labels,
    options: LossOptions,
    group: dist.ProcessGroup | None,
    kernel: str,
) -> Tensor:
    """Sum the losses of `x @ weight.T + bias` over all tokens.

    Forward computes the gradients that are wanted, block by block, for a loss whose gradient is 1;
    backward scales them. Each block has its all-reduces.

    Shape:
        x: [N, H]; weight: [V / ranks, H]; bias: [V / ranks]. Returns a scalar.
    """
    wanted = [y is not None and y.requires_grad for y in (x, weight, bias)]
    if not torch.is_grad_enabled():
        wanted = [False] * 3
    name = "" if group is None or group.size() == 1 else group.group_name
    numbers = labels.columns, labels.size, options.label_smoothing, options.z_loss
    return _forward(x, weight, bias, labels.local, labels.counts, *numbers, name, wanted, kernel)[0]


def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, local: Tensor, counts: Tensor, *how: Any
) -> Found:
    columns, vocabulary, smoothing, z_loss, group, wanted, name = how
    kernel = kernel_for(CROSS_ENTROPY_KERNELS, name, x)
    options = LossOptions(label_smoothing=smoothing, z_loss=z_loss)
    loss, grad_x, grad_weight, grad_bias = _fake(x, weight, bias, *how)
    for total in (loss, grad_weight, grad_bias):
        total.zero_()
    for rows in blocks_of(len(x), block_size(kernel, x, weight)):
        labels = Labels(local[rows], counts[rows], columns, vocabulary)
        logits = logits_of(x[rows], weight, bias)
        loss += _block_loss(logits, labels, options, group, kernel, wants_grad=any(wanted))
        if wanted[0]:
            torch.mm(logits, weight, out=grad_x[rows])
        if wanted[1]:
            add_product(grad_weight, logits.t(), x[rows])
        if wanted[2]:
            grad_bias += logits.sum(0, dtype=grad_bias.dtype)
    return loss, grad_x, grad_weight, grad_bias


def _block_loss(
    logits: Tensor,
    labels: Labels,
    options: LossOptions,
    group: str,
    kernel: Kernel,
    *,
    wants_grad: bool,
) -> Tensor:
    """Sum the losses of a block, and turn its logits into their gradient where that is wanted."""
    wants_total = options.label_smoothing > 0
    own: Terms = kernel.forward(logits, labels.local, labels.columns, wants_total=wants_total)
    whole = joined(own, group) if group else own
    if wants_grad:
        slopes = token_slopes(own[0], whole, labels, options)
        kernel.backward(logits, logits, labels.local, own[0], slopes, labels.columns)
    return token_losses(whole, labels, options).sum()


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Found:
    wanted, name = how[-2:]
    size = block_size(kernel_for(CROSS_ENTROPY_KERNELS, name, x), x, weight)
    dtype = sum_dtype(x.dtype, len(x), size)
    return (
        x.new_empty((), dtype=wide_dtype(x.dtype)),
        x.new_empty(x.shape if wanted[0] else 0),
        weight.new_empty(weight.shape if wanted[1] else 0, dtype=dtype),
        weight.new_empty(len(weight) if wanted[2] else 0, dtype=dtype),
    )


def _run_backward(grad: Tensor, *how: Any) -> tuple[Tensor, ...]:
    *grads, dtype = how
    return tuple(_scaled(one, grad, dtype) for one in grads)


def _scaled(grad: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`grad * scale`, multiplied in fp32 and rounded once.

    Rounded to bf16, one over the number of tokens would put a common factor on all gradients.
    """
    scale = scale.expand((1,) * grad.dim())  # without dims it would take the other's dtype
    return torch.mul(grad, scale, out=torch.empty_like(grad, dtype=dtype))


def _fake_backward(grad: Tensor, *how: Any) -> tuple[Tensor, ...]:
    *grads, dtype = how
    return tuple(torch.empty_like(one, dtype=dtype) for one in grads)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Found) -> None:
    ctx.set_materialize_grads(False)
    ctx.dtype = inputs[0].dtype
    ctx.save_for_backward(*output[1:])


def _gradient(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    rest = (None,) * 9
    if grads[0] is None:
        return (None, None, None, *rest)
    found = _backward(grads[0], *ctx.saved_tensors, ctx.dtype)
    needed = ctx.needs_input_grad[:3]
    return (*(g if needs else None for g, needs in zip(found, needed, strict=True)), *rest)


_backward = operator(
    "linear_loss_backward",
    "(Tensor grad, Tensor grad_x, Tensor grad_weight, Tensor grad_bias, ScalarType dtype) "
    "-> (Tensor, Tensor, Tensor)",
    _run_backward,
    fake=_fake_backward,
)
_forward = operator(
    "linear_loss",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor local, Tensor counts, int columns, int size, "
    "float smoothing, float z_loss, str group, bool[] wanted, str kernel) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _run,
    fake=_fake,
    setup=_setup,
    gradient=_gradient,
)
