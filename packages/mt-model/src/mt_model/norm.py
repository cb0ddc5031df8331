"""RMSNorm over the last dim; LayerNorm (Ba et al., 2016) is torch's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mt_model.config import NormConfig
from mt_model.initialization import start_from
from mt_model.kernels import (
    Kernel,
    eager_accelerator_obstacle,
    eager_cpu_obstacle,
    kernel_for,
    serves,
)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dim (Zhang & Sennrich, 2019).

    Computed in fp32 (fp64 for fp64) and rounded once. The plain form of `rms_norm`.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x_wide = x.to(wide)
    rstd = torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    return (x_wide * rstd * weight.to(wide)).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm by the fastest form for the device; see `rms_norm_reference` for the formula.

    torch's own kernel on an accelerator, the reference inside `torch.compile` (which fuses it),
    and `_CpuRMSNorm` in eager mode on a CPU, where torch's reaches a tenth of the bandwidth.

    Shape:
        x: [..., n]; weight: [n]. Returns the shape of x.
    """
    return kernel_for(RMS_NORM_KERNELS, x, weight, eps).run(x, weight, eps)


class _CpuRMSNorm(torch.autograd.Function):
    """Few vectorised passes: one fp32 copy forward, two buffers and two GEMVs backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        x_wide = x.to(wide)
        norm = torch.linalg.vector_norm(x_wide, dim=-1, keepdim=True)
        rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        y = x_wide * rstd if x_wide is x else x_wide.mul_(rstd)
        return y.mul_(weight.to(wide)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # With r = rstd: dx = r g w - x r^3 mean(g w x) and dw = sum over rows of r g x.
        # Row and column sums are GEMVs because those accumulate in fp32 at full bandwidth.
        x, weight, rstd = ctx.saved_tensors
        grad, width = grads[0], x.shape[-1]
        r = rstd.to(x.dtype)
        buffer = grad * x
        rows = buffer.reshape(-1, width)
        grad_weight = r.reshape(1, -1).mm(rows).view(width)
        dot = rows.mv(weight).view(rstd.shape).to(rstd.dtype)
        coefficient = (rstd * rstd * rstd * dot).div_(-width).to(x.dtype)
        torch.mul(grad, weight, out=buffer)
        return buffer.mul_(r).addcmul_(x, coefficient), grad_weight, None


def _torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


RMS_NORM_KERNELS: tuple[Kernel[Tensor], ...] = (
    Kernel("cpu", _CpuRMSNorm.apply, eager_cpu_obstacle),
    Kernel("torch", _torch_rms_norm, eager_accelerator_obstacle),
    Kernel("reference", rms_norm_reference, serves),
)


class RMSNorm(nn.Module):
    """RMSNorm with a weight, and no bias.

    Shape:
        forward(x): [..., size] -> [..., size].
    """

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device="meta"))
        start_from(self.weight, "ones")

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim."""
        return rms_norm(x, self.weight, self.eps)


def build_norm(config: NormConfig, size: int, *, dtype: torch.dtype) -> RMSNorm | nn.LayerNorm:
    """Build the norm that `config` names, on the meta device."""
    if config.kind == "rms":
        return RMSNorm(size, eps=config.eps, dtype=dtype)
    norm = nn.LayerNorm(size, eps=config.eps, dtype=dtype, device="meta")
    start_from(norm.weight, "ones")
    return norm
