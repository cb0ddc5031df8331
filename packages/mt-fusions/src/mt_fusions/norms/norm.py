"""The kernels of RMSNorm and LayerNorm, with or without the addition of a residual."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from mt_files import check_type
from mt_kernels import Registry, triton_obstacle
from torch import Tensor

from mt_fusions.arguments import check_floating, check_of_columns, check_same
from mt_fusions.blocks import as_rows, row_blocks, wide_dtype
from mt_fusions.kernels import Functions, implementations
from mt_fusions.norms.form import Form, Grads, Normed, Stats
from mt_fusions.operator import operator


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    form: Form,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """Return the norm of x, or of x plus the residual, and that sum, empty without one.

    Shape:
        x, residual: [..., n]; weight, bias: [n]. Returns the shape of x twice.
    """
    _check(x, residual, weight, bias, form.eps)
    found = _forward(x, residual, weight, bias, *form, kernel)
    return found[0], found[1]


def norm_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, form: Form
) -> Normed:
    """Return the norm, the sum, and mean and inverse root of each row, in plain torch.

    Shape:
        x, residual: [..., n]; weight, bias: [n]. Returns the shape of x twice, and [...] twice;
        empty what `form` does not have.
    """
    total = x if residual is None else x + residual
    wide = total.to(wide_dtype(x.dtype))
    mean = wide.mean(-1, keepdim=True) if form.centered else wide.new_empty(0)
    if form.centered:
        wide = wide - mean
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + form.eps)
    y = wide * rstd
    if form.rounds_first:
        y = y.to(x.dtype).to(wide.dtype)
    if weight is not None:
        y = y * _factor(weight, wide.dtype, form)
    if bias is not None:
        y = y + bias.to(wide.dtype)
    stats = mean.squeeze(-1).contiguous(), rstd.squeeze(-1).contiguous()
    kept = x.new_empty(0) if residual is None else total.contiguous()
    return y.to(x.dtype).contiguous(), kept, *stats


def _reference_backward(
    grad: Tensor,
    grad_total: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    stats: Stats,
    form: Form,
    *,
    sums: bool,
) -> Grads:
    wide, (mean, rstd) = wide_dtype(x.dtype), stats
    normed = x.to(wide) - mean.unsqueeze(-1) if form.centered else x.to(wide)
    normed = normed * rstd.unsqueeze(-1)
    grad = grad.to(wide)
    scaled = grad if weight is None else grad * _factor(weight, wide, form)
    grad_x = scaled - normed * (scaled * normed).mean(-1, keepdim=True)
    if form.centered:
        grad_x = grad_x - scaled.mean(-1, keepdim=True)
    grad_x = grad_x * rstd.unsqueeze(-1)
    if grad_total is not None:
        grad_x = grad_x + grad_total.to(wide)
    rows = (-1, x.shape[-1])
    has_weight, has_bias = sums and weight is not None, sums and form.has_bias
    grad_weight = (grad * normed).reshape(rows).sum(0) if has_weight else rstd.new_empty(0)
    grad_bias = grad.reshape(rows).sum(0) if has_bias else rstd.new_empty(0)
    return grad_x.to(x.dtype).contiguous(), grad_weight, grad_bias


def _factor(weight: Tensor, dtype: torch.dtype, form: Form) -> Tensor:
    """What multiplies: the weight, or 1 + w, which has more digits than w can have."""
    wide = weight.to(dtype)
    return wide + 1 if form.zero_centered else wide


def _ones_or_factor(x: Tensor, weight: Tensor | None, form: Form) -> Tensor:
    if weight is None:
        return x.new_ones(x.shape[-1], dtype=wide_dtype(x.dtype))
    return _factor(weight, wide_dtype(x.dtype), form)


def _cpu_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, form: Form
) -> Normed:
    total = x.new_empty(0) if residual is None else x.new_empty(x.shape)
    if form.centered:
        if residual is not None:
            x = torch.add(x, residual, out=total)
        factor = _ones_or_factor(x, weight, form)  # in fp32, or the kernel rounds mean and root
        shift = None if bias is None else bias.to(factor.dtype)
        y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], factor, shift, form.eps)
        return y, total, mean.squeeze(-1), rstd.squeeze(-1)
    y = x.new_empty(x.shape)
    rstd = x.new_empty(x.shape[:-1], dtype=wide_dtype(x.dtype))
    factor = None if weight is None else _factor(weight, rstd.dtype, form)
    for part, into, r, *more in _blocks(x, y, rstd, residual, total):
        if more:
            part = torch.add(part, more[0], out=more[1])
        _cpu_rms(part, into, r, factor, form)
    return y, total, rstd.new_empty(0), rstd


def _cpu_rms(x: Tensor, y: Tensor, rstd: Tensor, factor: Tensor | None, form: Form) -> None:
    """RMSNorm of a block into `y`, and the inverse roots."""
    wide, rstd = x.to(rstd.dtype), rstd.unsqueeze(1)
    torch.linalg.vector_norm(wide, dim=-1, keepdim=True, out=rstd)
    rstd.square_().div_(x.shape[-1]).add_(form.eps).rsqrt_()
    into = y if wide is x else wide
    torch.mul(wide, rstd, out=into)
    if form.rounds_first and into is not y:
        into.copy_(y.copy_(into))
    if factor is not None:
        into.mul_(factor)
    if into is not y:
        y.copy_(into)


def _cpu_backward(
    grad: Tensor,
    grad_total: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    stats: Stats,
    form: Form,
    *,
    sums: bool,
) -> Grads:
    """Use torch's fused backward of LayerNorm, which takes mean and inverse root from outside.

    With the mean 0 it is `r (g w - mean(g w) - x r mean(g w x r))`: the gradient of RMSNorm but for
    `r mean(g w)`, which is added afterwards. The gradient of the weight is the same.
    """
    mean, rstd = stats
    factor = _ones_or_factor(x, weight, form)
    mask = True, sums and weight is not None, sums and form.has_bias
    if form.centered and x.dtype == rstd.dtype:
        found, *totals = _layer_norm_backward(grad, x, mean, rstd, factor, mask)
        return found if grad_total is None else found.add_(grad_total), totals[0], totals[1]
    grad_x = x.new_empty(x.shape)
    totals = [factor.new_zeros(x.shape[-1] if there else 0) for there in mask[1:]]
    mean = mean if form.centered else torch.zeros_like(rstd)
    for g, part, m, r, out, *more in _blocks(grad, x, mean, rstd, grad_x, grad_total):
        # In fp32: torch sums the gradient of the weight in the dtype of `grad`.
        g_wide, part_wide = g.to(rstd.dtype), part.to(rstd.dtype)
        found, *of_block = _layer_norm_backward(g_wide, part_wide, m, r, factor, mask)
        for total, own in zip(totals, of_block, strict=True):
            total += own
        if not form.centered:
            more.append(g_wide.mv(factor).mul_(r).div_(x.shape[-1]).unsqueeze_(1))
        for extra in more[:-1]:
            found += extra
        if more and out.dtype == found.dtype:
            torch.add(found, more[-1], out=out)
        else:
            out.copy_(found.add_(more[-1]) if more else found)
    return grad_x, totals[0], totals[1]


def _layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    factor: Tensor,
    mask: tuple[bool, bool, bool],
) -> Grads:
    """torch's, which looks at no bias but for its presence; empty what is not wanted."""
    shape, stats = x.shape[-1:], (mean.unsqueeze(-1), rstd.unsqueeze(-1))
    shift = factor if mask[2] else None
    found = torch.ops.aten.native_layer_norm_backward(grad, x, shape, *stats, factor, shift, mask)
    own = (x if there else rstd.new_empty(0) for x, there in zip(found, mask, strict=True))
    return tuple(own)  # pyright: ignore[reportReturnType] - of three


def _blocks(first: Tensor, *rest: Tensor | None) -> Iterator[tuple[Tensor, ...]]:
    """Yield blocks of rows of all non-empty tensors; some have one number per row."""
    if not first.numel():
        return iter(())
    there = [first, *(x for x in rest if x is not None and x.numel())]
    return row_blocks(*(as_rows(x) if x.dim() == first.dim() else x.reshape(-1) for x in there))


def _triton() -> Functions:
    from mt_fusions.norms.triton_norm import backward, forward

    return Functions(forward, backward)


def _kernels(operation: str, widest: int) -> Registry[Any]:
    def obstacle(x: Tensor, *_: Any) -> str | None:
        if x.shape[-1] > widest:  # a Triton program holds a row in registers
            return f"rows of {x.shape[-1]} elements are longer than {widest}"
        return triton_obstacle(x)

    return implementations(
        operation,
        cpu=Functions(_cpu_forward, _cpu_backward),
        triton=_triton,
        reference=Functions(norm_reference, _reference_backward),
        obstacle=obstacle,
    )


RMS_NORM_KERNELS = _kernels("rms_norm", 16384)
LAYER_NORM_KERNELS = _kernels("layer_norm", 8192)  # it sums two gradients in registers


def _run(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, *how: Any
) -> Normed:
    form = Form(*how[:-1])
    return _functions(form, how[-1], x).forward(x, residual, weight, bias, form)


def _functions(form: Form, name: str, x: Tensor) -> Any:
    kernels = LAYER_NORM_KERNELS if form.centered else RMS_NORM_KERNELS
    return kernels.find(name, x).function


def _fake(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, *how: Any
) -> Normed:
    rstd = x.new_empty(x.shape[:-1], dtype=wide_dtype(x.dtype))
    return (
        x.new_empty(x.shape),
        x.new_empty(0 if residual is None else x.shape),
        torch.empty_like(rstd) if Form(*how[:-1]).centered else rstd.new_empty(0),
        rstd,
    )


def _run_backward(
    grad: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor | None, *how: Any
) -> Grads:
    mean, rstd, bias_dtype, sums, *terms, name = how
    form = Form(*terms)
    kernel = _functions(form, name, x)
    found = kernel.backward(grad, grad_total, x, weight, (mean, rstd), form, sums=sums)
    return (
        found[0],
        found[1] if weight is None else found[1].to(weight.dtype),
        found[2].to(bias_dtype),
    )


def _fake_backward(
    grad: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor | None, *how: Any
) -> Grads:
    rstd, bias_dtype, sums, *terms = how[1:-1]
    size = x.shape[-1] if sums else 0
    return (
        x.new_empty(x.shape),
        rstd.new_empty(0) if weight is None else weight.new_empty(size),
        x.new_empty(size if Form(*terms).has_bias else 0, dtype=bias_dtype),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Normed) -> None:
    x, residual, weight, bias, *ctx.how = inputs
    ctx.bias_dtype = output[3].dtype if bias is None else bias.dtype
    ctx.adds = residual is not None
    ctx.save_for_backward(output[1] if ctx.adds else x, weight, *output[2:])


def _gradient(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    x, weight, *stats = ctx.saved_tensors
    given = grads[0], grads[1] if ctx.adds else None
    of_weight, of_bias = ctx.needs_input_grad[2:4]  # not of what is frozen
    sums = of_weight or of_bias
    found = _backward(*given, x, weight, *stats, ctx.bias_dtype, sums, *ctx.how)
    return (
        found[0],
        found[0] if ctx.adds else None,
        found[1] if of_weight else None,
        found[2] if of_bias else None,
        *(None for _ in ctx.how),
    )


_FORM = "float eps, bool centered, bool zero_centered, bool rounds_first, bool has_bias, str kernel"
_backward = operator(
    "norm_backward",
    "(Tensor grad, Tensor? grad_total, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, "
    f"ScalarType bias_dtype, bool sums, {_FORM}) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    fake=_fake_backward,
)
_forward = operator(
    "norm",
    f"(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, {_FORM}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _run,
    fake=_fake,
    setup=_setup,
    gradient=_gradient,
)


def _check(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> None:
    check_floating("x", x)
    check_type("eps", eps, float, int)
    if not 0 < eps < math.inf:
        raise ValueError(f"eps must be above 0 and finite, got {eps}")
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x {tuple(x.shape)} has no last dim to normalise")
    if residual is not None:
        check_floating("residual", residual)
        check_same("residual", residual, "x", x)
    for name, y in {"weight": weight, "bias": bias}.items():
        if y is not None:
            check_of_columns(name, y, x)
