"""RMSNorm over the last dim; LayerNorm (Ba et al., 2016) is torch's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mt_model.initialization import start_from
from mt_model.kernels import (
    Kernel,
    eager_accelerator_obstacle,
    eager_cpu_obstacle,
    kernel_for,
    serves,
)
from mt_model.norm_config import NormConfig


def rms_norm_reference(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
    rounds_first: bool = False,
) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dim (Zhang & Sennrich, 2019).

    Computed in fp32 (fp64 for fp64) and rounded once; with `rounds_first` the weight multiplies
    what is rounded. The plain form of `rms_norm`.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x_wide = x.to(wide)
    y = x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return y.to(x.dtype)
    if rounds_first:
        return y.to(x.dtype) * weight
    factor = weight.to(wide)
    return (y * (factor + 1 if zero_centered else factor)).to(x.dtype)


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
    rounds_first: bool = False,
) -> Tensor:
    """RMSNorm by the fastest form for the device; see `rms_norm_reference` for the formula.

    torch's own kernel on an accelerator, the reference inside `torch.compile` (which fuses it),
    and `_CpuRMSNorm` in eager mode on a CPU, where torch's reaches a tenth of the bandwidth.

    Args:
        x: Any strides.
        weight: None multiplies nothing.
        eps: Added to the mean square.
        zero_centered: The weight w stands for 1 + w.
        rounds_first: The weight multiplies after the rounding to the dtype of `x`.

    Shape:
        x: [..., n]; weight: [n]. Returns the shape of x.
    """
    kernel = kernel_for(RMS_NORM_KERNELS, x, weight)
    return kernel.run(x, weight, eps, zero_centered=zero_centered, rounds_first=rounds_first)


class _CpuRMSNorm(torch.autograd.Function):
    """Few vectorised passes: one fp32 copy forward, two buffers and two GEMVs backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, form: tuple[bool, bool]) -> Tensor:
        zero_centered, rounds_first = form
        wide = torch.promote_types(x.dtype, torch.float32)
        x_wide = x.to(wide)
        norm = torch.linalg.vector_norm(x_wide, dim=-1, keepdim=True)
        rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        ctx.zero_centered = zero_centered
        y = x_wide * rstd if x_wide is x else x_wide.mul_(rstd)
        if rounds_first:
            return y.to(x.dtype).mul_(weight)
        factor = weight.to(wide)
        return y.mul_(factor + 1 if zero_centered else factor).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # With r = rstd: dx = r g w - x r^3 mean(g w x) and dw = sum over rows of r g x.
        # Row and column sums are GEMVs because those accumulate in fp32 at full bandwidth.
        x, weight, rstd = ctx.saved_tensors
        if ctx.zero_centered:
            weight = weight + 1
        grad, width = grads[0], x.shape[-1]
        r = rstd.to(x.dtype)
        buffer = grad * x
        rows = buffer.reshape(-1, width)
        grad_weight = r.reshape(1, -1).mm(rows).view(width)
        dot = rows.mv(weight).view(rstd.shape).to(rstd.dtype)
        coefficient = (rstd * rstd * rstd * dot).div_(-width).to(x.dtype)
        torch.mul(grad, weight, out=buffer)
        return buffer.mul_(r).addcmul_(x, coefficient), grad_weight, None, None


def _cpu_rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool, rounds_first: bool
) -> Tensor:
    return _CpuRMSNorm.apply(x, weight, eps, (zero_centered, rounds_first))  # pyright: ignore[reportReturnType]


def _cpu_obstacle(x: Tensor, weight: Tensor | None) -> str | None:
    return eager_cpu_obstacle(x) or ("no weight" if weight is None else None)


def _torch_rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, zero_centered: bool, rounds_first: bool
) -> Tensor:
    if rounds_first and weight is not None:
        return F.rms_norm(x, x.shape[-1:], None, eps) * weight
    if zero_centered and weight is not None:  # 1 + w has fewer digits than w, so in fp32
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), weight.shape, weight.to(wide) + 1, eps).to(x.dtype)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


RMS_NORM_KERNELS: tuple[Kernel[Tensor], ...] = (
    Kernel("cpu", _cpu_rms_norm, _cpu_obstacle),
    Kernel("torch", _torch_rms_norm, eager_accelerator_obstacle),
    Kernel("reference", rms_norm_reference, serves),
)


class RMSNorm(nn.Module):
    """RMSNorm, with a weight or without, and no bias.

    Args:
        size: Of the last dim.
        eps: Added to the mean square.
        dtype: Of the weight.
        zero_centered: The weight w stands for 1 + w, and starts at 0.
        rounds_first: The weight multiplies after the rounding to the dtype of the input.
        weight: There is one.

    Shape:
        forward(x): [..., size] -> [..., size].
    """

    def __init__(
        self,
        size: int,
        *,
        eps: float,
        dtype: torch.dtype,
        zero_centered: bool = False,
        rounds_first: bool = False,
        weight: bool = True,
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered, self.rounds_first = eps, zero_centered, rounds_first
        self.weight: Tensor | None = None
        if weight:
            param = nn.Parameter(torch.empty(size, dtype=dtype, device="meta"))
            start_from(param, "zeros" if zero_centered else "ones")
            self.weight = param

    def factor(self) -> Tensor | None:
        """What multiplies the normalised value: the weight, or 1 + w where it is zero-centred."""
        return self.weight + 1 if self.weight is not None and self.zero_centered else self.weight

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim."""
        return rms_norm(
            x,
            self.weight,
            self.eps,
            zero_centered=self.zero_centered,
            rounds_first=self.rounds_first,
        )


class ZeroCenteredLayerNorm(nn.LayerNorm):
    """torch's LayerNorm with a weight that stands for 1 + w."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last dim."""
        return F.layer_norm(input, self.normalized_shape, self.weight + 1, self.bias, self.eps)


def build_rms_norm(config: NormConfig, size: int, *, dtype: torch.dtype) -> RMSNorm:
    """Build an RMSNorm on the meta device as `config` describes it, whatever its kind."""
    return RMSNorm(
        size,
        eps=config.eps,
        dtype=dtype,
        zero_centered=config.zero_centered,
        rounds_first=config.rounds_first,
        weight=config.weight,
    )


def build_norm(config: NormConfig, size: int, *, dtype: torch.dtype) -> RMSNorm | nn.LayerNorm:
    """Build the norm that `config` describes, on the meta device."""
    if config.kind == "rms":
        return build_rms_norm(config, size, dtype=dtype)
    norm = (ZeroCenteredLayerNorm if config.zero_centered else nn.LayerNorm)(
        size,
        eps=config.eps,
        elementwise_affine=config.weight,
        bias=config.has_bias,
        dtype=dtype,
        device="meta",
    )
    if config.weight:
        start_from(norm.weight, "zeros" if config.zero_centered else "ones")
    return norm
