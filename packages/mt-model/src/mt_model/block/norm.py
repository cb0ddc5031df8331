"""RMSNorm over the last dim, and the norm that a configuration describes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mt_fusions
import torch
import torch.nn.functional as F
from mt_files import AUTO
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mt_model.block.initial import start_from
from mt_model.block.layer_norm import LayerNorm, LayerNormForm
from mt_model.block.norm_config import NormConfig
from mt_model.block.shard_context import ShardContext
from mt_model.block.stream import StreamConfig
from mt_model.kernels.choice import (
    Kernel,
    KernelChoice,
    accelerator_drawback,
    choice_of,
    chosen_kernel,
    eager_cpu_obstacle,
    fused_drawback,
    fused_obstacle,
    serves,
)


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
        return (y.to(x.dtype) * weight).to(x.dtype)
    factor = weight.to(wide)
    return (y * (factor + 1 if zero_centered else factor)).to(x.dtype)


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
    rounds_first: bool = False,
    kernel: str = AUTO,
) -> Tensor:
    """RMSNorm by a named kernel; see `rms_norm_reference` for the formula.

    `auto` is the fastest for the device: torch's own kernel on an accelerator, the reference inside
    `torch.compile` (which fuses it), and `_CpuRMSNorm` in eager mode on a CPU, where torch's
    reaches a tenth of the bandwidth.

    Args:
        x: Any strides.
        weight: None multiplies nothing.
        eps: Added to the mean square.
        zero_centered: The weight w stands for 1 + w.
        rounds_first: The weight multiplies after the rounding to the dtype of `x`.
        kernel: Of `RMS_NORM_KERNELS`, by name.

    Shape:
        x: [..., n]; weight: [n]. Returns the shape of x.

    Raises:
        ValueError: The named kernel does not serve; the message says why.
    """
    chosen = chosen_kernel("norm", RMS_NORM_KERNELS, kernel, x, weight)
    return chosen.run(x, weight, eps, zero_centered=zero_centered, rounds_first=rounds_first)


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


def _cpu_rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool, rounds_first: bool
) -> Tensor:
    return _CpuRMSNorm.apply(x, weight, eps, (zero_centered, rounds_first))  # pyright: ignore[reportReturnType]


def _cpu_obstacle(x: Tensor, weight: Tensor | None) -> str | None:
    return eager_cpu_obstacle(x) or ("no weight" if weight is None else None)


def _fused_rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, zero_centered: bool, rounds_first: bool
) -> Tensor:
    form = {"zero_centered": zero_centered, "rounds_first": rounds_first}
    return mt_fusions.rms_norm(x, weight, eps, **form, kernel=mt_fusions.fused_kernel(x))


def _fused_obstacle(x: Tensor, weight: Tensor | None) -> str | None:
    del weight
    return fused_obstacle("rms_norm", x)


def _torch_rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, zero_centered: bool, rounds_first: bool
) -> Tensor:
    if rounds_first and weight is not None:
        return (F.rms_norm(x, x.shape[-1:], None, eps) * weight).to(x.dtype)
    if weight is not None and (zero_centered or weight.dtype != x.dtype):
        wide = torch.promote_types(x.dtype, torch.float32)  # 1 + w has fewer digits than w
        factor = weight.to(wide) + 1 if zero_centered else weight.to(wide)
        return F.rms_norm(x.to(wide), weight.shape, factor, eps).to(x.dtype)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


RMS_NORM_KERNELS: tuple[Kernel[Tensor], ...] = (
    Kernel("fused", _fused_rms_norm, _fused_obstacle, fused_drawback),
    Kernel("cpu", _cpu_rms_norm, _cpu_obstacle),
    Kernel("torch", _torch_rms_norm, serves, accelerator_drawback),
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
        kernel: Of `RMS_NORM_KERNELS`, by name.

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
        kernel: str = AUTO,
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.size, self.eps = size, eps
        self.zero_centered, self.rounds_first = zero_centered, rounds_first
        self.weight: Tensor | None = None
        if weight:
            param = nn.Parameter(torch.empty(size, dtype=dtype, device="meta"))
            start_from(param, "zeros" if zero_centered else "ones")
            self.weight = param

    def factor(self) -> Tensor | None:
        """What multiplies the normalised value: the weight, or 1 + w where it is zero-centred."""
        return self.weight + 1 if self.weight is not None and self.zero_centered else self.weight

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise the last dim; of a sum with a residual, returned too, by mt-fusions."""
        form = {"zero_centered": self.zero_centered, "rounds_first": self.rounds_first}
        if residual is None:
            return rms_norm(x, self.weight, self.eps, **form, kernel=self.kernel)
        kernel = mt_fusions.fused_kernel(x)
        return mt_fusions.add_rms_norm(x, residual, self.weight, self.eps, **form, kernel=kernel)

    def kernel_choices(self, like: Tensor) -> Iterator[KernelChoice]:
        """Say what computes this for tensors of the device and dtype of `like`."""
        x = like.new_empty(0, self.size)
        yield choice_of("norm", RMS_NORM_KERNELS, self.kernel, x, self.weight)


def build_rms_norm(
    config: NormConfig, size: int, *, dtype: torch.dtype, kernel: str = AUTO
) -> RMSNorm:
    """Build an RMSNorm on the meta device as `config` describes it, whatever its kind."""
    return RMSNorm(
        size,
        eps=config.eps,
        dtype=dtype,
        zero_centered=config.zero_centered,
        rounds_first=config.rounds_first,
        weight=config.weight,
        kernel=kernel,
    )


def build_norm(
    config: NormConfig, size: int, *, dtype: torch.dtype, kernel: str = AUTO
) -> RMSNorm | LayerNorm:
    """Build the norm that `config` describes, on the meta device."""
    if config.kind == "rms":
        return build_rms_norm(config, size, dtype=dtype, kernel=kernel)
    norm = LayerNorm(
        size,
        form=LayerNormForm(eps=config.eps, zero_centered=config.zero_centered),
        weight=config.weight,
        bias=config.has_bias,
        dtype=dtype,
        kernel=kernel,
    )
    if config.weight:
        start_from(norm.weight, "zeros" if config.zero_centered else "ones")
    return norm


def stream_norm(stream: StreamConfig, shard: ShardContext) -> nn.Module:
    """Build a norm of the residual stream, which every rank has whole, on the meta device."""
    norm = build_norm(stream.norm, stream.hidden_size, dtype=shard.dtype, kernel=shard.kernels.norm)
    shard.mark_replicated(norm, partial=shard.sequence_parallel)
    return norm
