"""RMSNorm over the last dim (Zhang & Sennrich, 2019)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from mt_kernels import AUTO, Candidate, Registry, cpu_obstacle, eager_obstacle
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_fusions.kernels import accelerator_drawback, fused
from mt_fusions.norms.form import Form
from mt_fusions.norms.norm import RMS_NORM_KERNELS, norm, norm_reference


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
    rounds_first: bool = False,
    kernel: str = AUTO,
) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dim.

    Computed in fp32 (fp64 for fp64) and rounded once, to the dtype of `x`, also under autocast. Per
    head where heads are a dim of `x`. Backward keeps `x`, the weight and one number per row.

    Args:
        x: Any strides; the result is contiguous.
        weight: Any floating dtype; None multiplies nothing.
        eps: Added to the mean square.
        zero_centered: The weight w stands for 1 + w (Gemma).
        rounds_first: The weight multiplies the value rounded to the dtype of `x` (Llama). No
            difference in fp32.
        kernel: "auto", or one of "cpu", "triton" and "reference" by name.

    Shape:
        x: [..., n]; weight: [n]. Returns the shape of x.

    Raises:
        TypeError: Something is no floating tensor, or no number.
        ValueError: Shapes or devices do not fit, or the kernel does not serve.
    """
    form = Form(eps, zero_centered=zero_centered, rounds_first=rounds_first)
    return norm(x, None, weight, None, form, kernel)[0]


def _reference(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
    rounds_first: bool = False,
) -> Tensor:
    form = Form(eps, zero_centered=zero_centered, rounds_first=rounds_first)
    return norm_reference(x, None, weight, None, form)[0]


def _normed(
    x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool, rounds_first: bool
) -> tuple[Tensor, Tensor]:
    """Return the normalised rows and each row's inverse RMS, with one copy in fp32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x_wide = x.to(wide)
    norm = torch.linalg.vector_norm(x_wide, dim=-1, keepdim=True)
    rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    y = x_wide * rstd if x_wide is x else x_wide.mul_(rstd)
    if rounds_first:
        return y.to(x.dtype).mul_(weight), rstd
    return y.mul_(weight.to(wide) + 1 if zero_centered else weight).to(x.dtype), rstd


class _FewPasses(torch.autograd.Function):
    """Few vectorised passes: one fp32 copy forward, two buffers and two GEMVs backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, form: dict[str, bool]) -> Tensor:
        y, rstd = _normed(x, weight, eps, **form)
        ctx.save_for_backward(x, weight, rstd)
        ctx.zero_centered = form["zero_centered"]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # With r = rstd: dx = r g w - x r^3 mean(g w x) and dw = sum over rows of r g x.
        # Row and column sums are GEMVs because those accumulate in fp32 at full bandwidth.
        x, weight, rstd = ctx.saved_tensors
        weight = (weight + 1 if ctx.zero_centered else weight).to(x.dtype)  # autocast's is wider
        grad, width = grads[0], x.shape[-1]
        r = rstd.to(x.dtype)
        buffer = grad * x
        rows = buffer.reshape(-1, width)
        grad_weight = r.reshape(1, -1).mm(rows).view(width)
        dot = rows.mv(weight).view(rstd.shape).to(rstd.dtype)
        coefficient = (rstd * rstd * rstd * dot).div_(-width).to(x.dtype)
        torch.mul(grad, weight, out=buffer)
        return buffer.mul_(r).addcmul_(x, coefficient), grad_weight, None, None


def _few_passes(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    zero_centered: bool = False,
    rounds_first: bool = False,
) -> Tensor:
    form = {"zero_centered": zero_centered, "rounds_first": rounds_first}
    if not torch.is_grad_enabled():  # an autograd function costs as much as the norm of one row
        return _normed(x, weight, eps, **form)[0]
    return _FewPasses.apply(x, weight, eps, form)  # pyright: ignore[reportReturnType]


def _few_passes_obstacle(x: Tensor, weight: Tensor | None) -> str | None:
    return eager_obstacle() or cpu_obstacle(x) or ("no weight" if weight is None else None)


def _torch(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
    rounds_first: bool = False,
) -> Tensor:
    if rounds_first and weight is not None:
        return (F.rms_norm(x, x.shape[-1:], None, eps) * weight).to(x.dtype)
    if weight is not None and (zero_centered or weight.dtype != x.dtype):
        wide = torch.promote_types(x.dtype, torch.float32)  # 1 + w has fewer digits than w
        factor = weight.to(wide) + 1 if zero_centered else weight.to(wide)
        return F.rms_norm(x.to(wide), weight.shape, factor, eps).to(x.dtype)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


RMS_NORM: Registry[Callable[..., Tensor]] = Registry(
    "rms_norm",
    (
        fused(rms_norm, RMS_NORM_KERNELS),
        Candidate("cpu", _few_passes, _few_passes_obstacle),
        Candidate("torch", _torch, drawback=accelerator_drawback),
        Candidate("reference", _reference),
    ),
)
"""Functions of `rms_norm`'s arguments but the last; obstacles get `x` and the weight."""
