"""A bias, dropout and a residual: what ends a sublayer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from mt_files import check_type
from mt_kernels import AUTO
from torch import Tensor

from mt_fusions.arguments import check_floating, check_of_columns, check_same
from mt_fusions.blocks import as_rows, row_blocks, wide_dtype
from mt_fusions.kernels import Functions, implementations
from mt_fusions.operator import operator
from mt_fusions.residual.dropout import kept, scale

Grads = tuple[Tensor, Tensor]  # of x and, in fp32 at least, of the bias
_INDICES = 1 << 15  # of one thread: two blocks of int64 stay in its L2 cache


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    probability: float = 0.0,
    *,
    key: int = 0,
    first: Tensor | None = None,
    kernel: str = AUTO,
) -> Tensor:
    """`residual + dropout(x + bias)`, with a mask from a key and counters.

    Kept elements are divided by `1 - probability`. The mask equals
    `random_uniform(key, first[..., None] + arange(n)) >= probability` of mt-parallel-state, on
    every device and for every split of the rows. The arithmetic is in fp32 (fp64 for fp64), rounded
    once to the dtype of `x`. Backward keeps only `first`, and makes the mask again.

    Args:
        x: Any strides; the result is contiguous.
        bias: Any floating dtype; None adds nothing.
        residual: Same dtype as `x`.
        probability: Probability that an element is dropped; 0 outside of training.
        key: From `hash_key` of mt-parallel-state: 63 bits.
        first: Global index of each row's first element, in int64; needed with a probability.
        kernel: "auto", or one of "cpu", "triton" and "reference" by name.

    Shape:
        x, residual: [..., n]; bias: [n]; first: [...]. Returns the shape of x.

    Raises:
        TypeError: Something is no tensor of the right kind, or no number.
        ValueError: Shapes or devices do not fit, the probability or the key is out of range, or the
            kernel does not serve.
    """
    _check(x, bias, residual)
    _check_dropout(x, probability, key, first)
    return _forward(x, bias, residual, first if probability else None, probability, key, kernel)


class Dropout(NamedTuple):
    """Attributes: `probability` of being dropped, and the `key` of the mask."""

    probability: float
    key: int


def _factors(first: Tensor, size: int, how: Dropout, dtype: torch.dtype) -> Tensor:
    """Return 0 for dropped elements and one scale for kept elements."""
    index = first.unsqueeze(-1) + torch.arange(size, device=first.device)
    return kept(index, *how).to(dtype).mul_(scale(how.probability, dtype))


def _reference(
    x: Tensor, bias: Tensor | None, residual: Tensor, first: Tensor | None, how: Dropout
) -> Tensor:
    wide = wide_dtype(x.dtype)
    y = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
    if first is not None:
        y = y * _factors(first, x.shape[-1], how, wide)
    return (y + residual.to(wide)).to(x.dtype).contiguous()


def _reference_backward(grad: Tensor, first: Tensor, how: Dropout) -> Grads:
    wide, size = wide_dtype(grad.dtype), grad.shape[-1]
    found = grad.to(wide) * _factors(first, size, how, wide)
    return found.to(grad.dtype).contiguous(), found.reshape(-1, size).sum(0)


def _cpu_forward(
    x: Tensor, bias: Tensor | None, residual: Tensor, first: Tensor | None, how: Dropout
) -> Tensor:
    """By the reference, in blocks."""
    out = x.new_empty(x.shape)
    rows = [as_rows(y) for y in (out, x, residual)]
    if first is None:
        blocks = row_blocks(*rows)
    else:
        blocks = row_blocks(*rows, first.reshape(-1), elements=_INDICES)
    for into, part, rest, *index in blocks:
        into.copy_(_reference(part, bias, rest, index[0] if index else None, how))
    return out


def _cpu_backward(grad: Tensor, first: Tensor, how: Dropout) -> Grads:
    out = grad.new_empty(grad.shape)
    total = grad.new_zeros(grad.shape[-1], dtype=wide_dtype(grad.dtype))
    rows = as_rows(out), as_rows(grad), first.reshape(-1)
    for into, part, index in row_blocks(*rows, elements=_INDICES):
        found, of_block = _reference_backward(part, index, how)
        into.copy_(found)
        total += of_block
    return out, total


def _triton() -> Functions:
    from mt_fusions.residual.triton_bias_dropout_add import backward, forward

    return Functions(forward, backward)


BIAS_DROPOUT_ADD_KERNELS = implementations(
    "bias_dropout_add",
    cpu=Functions(_cpu_forward, _cpu_backward),
    triton=_triton,
    reference=Functions(_reference, _reference_backward),
)


def _run(
    x: Tensor, bias: Tensor | None, residual: Tensor, first: Tensor | None, *how: Any
) -> Tensor:
    kernel = BIAS_DROPOUT_ADD_KERNELS.find(how[-1], x).function
    return kernel.forward(x, bias, residual, first, Dropout(*how[:-1]))


def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _run_backward(grad: Tensor, first: Tensor, *how: Any) -> Grads:
    kernel = BIAS_DROPOUT_ADD_KERNELS.find(how[-1], grad).function
    return kernel.backward(grad, first, Dropout(*how[:-1]))


def _fake_backward(grad: Tensor, *_: Any) -> Grads:
    return (
        grad.new_empty(grad.shape),
        grad.new_empty(grad.shape[-1], dtype=wide_dtype(grad.dtype)),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, _, first, *ctx.how = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(first)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (first,) = ctx.saved_tensors
    has_bias = ctx.bias_dtype is not None
    if first is not None:
        grad_x, total = _backward(grad, first, *ctx.how)
        return grad_x, total.to(ctx.bias_dtype) if has_bias else None, grad, *(None,) * 4
    of_bias = None
    if has_bias:
        rows = grad.reshape(-1, grad.shape[-1])
        of_bias = rows.sum(0, dtype=wide_dtype(grad.dtype)).to(ctx.bias_dtype)
    return grad, of_bias, grad, *(None,) * 4


_backward = operator(
    "bias_dropout_add_backward",
    "(Tensor grad, Tensor first, float probability, int key, str kernel) -> (Tensor, Tensor)",
    _run_backward,
    fake=_fake_backward,
)
_forward = operator(
    "bias_dropout_add",
    "(Tensor x, Tensor? bias, Tensor residual, Tensor? first, float probability, int key, "
    "str kernel) -> Tensor",
    _run,
    fake=_fake,
    setup=_setup,
    gradient=_gradient,
)


def _check(x: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    check_floating("x", x)
    if not x.dim() or not x.shape[-1]:
        raise ValueError(f"x {tuple(x.shape)} must have a last dim of one element at least")
    check_floating("residual", residual)
    check_same("residual", residual, "x", x)
    if bias is not None:
        check_of_columns("bias", bias, x)


def _check_dropout(x: Tensor, probability: float, key: int, first: Tensor | None) -> None:
    check_type("probability", probability, float, int)
    check_type("key", key, int)
    if not 0 <= probability < 1:
        raise ValueError(f"probability must be from 0 to below 1, got {probability}")
    if not 0 <= key < 2**63:
        raise ValueError(f"key must have 63 bits, as hash_key returns it, got {key}")
    if not probability:
        return
    check_type("first", first, Tensor)
    if first is None or first.dtype != torch.int64:
        raise TypeError("first must be a tensor of int64: each row's global index")
    if first.shape != x.shape[:-1] or first.device != x.device:
        raise ValueError(
            f"first {tuple(first.shape)} on {first.device} must have one number for each row of "
            f"x {tuple(x.shape)} on {x.device}"
        )
