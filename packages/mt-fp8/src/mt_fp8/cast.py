"""Kernels that make codes and scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from mt_kernels import Candidate, Registry, cpu_obstacle, triton_obstacle
from torch import Tensor

from mt_fp8.block import block_dims, in_blocks, out_of_blocks, per_block, scales_shape
from mt_fp8.element import encode, round_randomly
from mt_fp8.hadamard import check_rotates, rotate
from mt_fp8.job import Job
from mt_fp8.scale import factor_of, nvfp4_scales, scale_of
from mt_fp8.scaling import Scaling

_WIDEST = 128  # largest side of a block that a Triton program holds


class CastKernel(NamedTuple):
    """The two functions of a kernel that quantises.

    Attributes:
        amax: Takes a tensor, and whether to rotate it first; returns its largest finite magnitude.
        cast: Takes a tensor and a job; returns codes and scales.
    """

    amax: Callable[[Tensor, bool], Tensor]
    cast: Callable[[Tensor, Job], tuple[Tensor, Tensor]]


def largest(x: Tensor, scaling: Scaling, shape: Sequence[int]) -> Tensor:
    """Return the largest finite magnitudes of `in_blocks(x)`, in the shape of scales."""
    sizes = scales_shape(shape, scaling)
    if not x.numel():
        return x.new_zeros(sizes, dtype=torch.float32)
    size = torch.nan_to_num(x.to(torch.float32).abs(), nan=0.0, posinf=0.0)
    return size.amax(block_dims(x, scaling)).view(sizes)


def values_of(x: Tensor, *, hadamard: bool) -> Tensor:
    """Return the values to quantise in fp32, rotated if `hadamard` says so."""
    x = x.detach().to(torch.float32)
    if not hadamard:
        return x
    check_rotates(x.shape[-1])
    return rotate(x)


def _amax(x: Tensor, hadamard: bool) -> Tensor:  # noqa: FBT001 - a kernel's own
    return largest(values_of(x, hadamard=hadamard), Scaling(), x.shape)


def _cast(x: Tensor, job: Job) -> tuple[Tensor, Tensor]:
    scaling = job.scaling
    blocks = in_blocks(values_of(x, hadamard=scaling.hadamard), scaling)
    if scaling.scale == "nvfp4" and job.factor is not None:
        amax = largest(blocks, scaling, x.shape)
        scales, factors = nvfp4_scales(amax, job.factor, scaling)
    else:
        factors = job.factor
        if factors is None:
            factors = factor_of(largest(blocks, scaling, x.shape), scaling)
        scales = scale_of(factors, scaling)
    scaled = out_of_blocks(blocks * per_block(factors, scaling), x.shape, scaling)
    if scaling.stochastic and job.seed is not None:
        index = torch.arange(x.numel(), device=x.device).view(x.shape)
        scaled = round_randomly(scaled, scaling.elements, job.seed, index)
    if not scaling.elements.has_nan:
        scales = _marked(scales, blocks, scaling)
    return encode(scaled, scaling.elements), scales


def _marked(scales: Tensor, blocks: Tensor, scaling: Scaling) -> Tensor:
    """Set the scales of blocks that contain a NaN to NaN."""
    bad = blocks.isnan().to(torch.float32)
    if not bad.numel():
        return scales
    bad = bad.amax(block_dims(blocks, scaling)).view(scales.shape) > 0
    if scales.dtype == torch.float32:
        return torch.where(bad, torch.nan, scales)
    nan = 0xFF if scales.dtype == torch.float8_e8m0fnu else 0x7F
    return torch.where(bad, nan, scales.view(torch.uint8)).view(scales.dtype)


def _triton_amax(x: Tensor, hadamard: bool) -> Tensor:  # noqa: FBT001
    from mt_fp8.gpu.cast import amax

    return amax(x, hadamard=hadamard)


def _triton_cast(x: Tensor, job: Job) -> tuple[Tensor, Tensor]:
    from mt_fp8.gpu.cast import cast

    return cast(x, job)


def _triton_obstacle(x: Tensor, scaling: Scaling, has_factor: bool) -> str | None:  # noqa: FBT001
    why = triton_obstacle(x, any_dtype=True)
    if why is not None:
        return why
    block = scaling.block
    if block in ("head", "token"):
        return f"it has no scales of block {block!r}"
    if isinstance(block, str):
        return None if scaling.elements.has_nan else "it scales e2m1 by blocks only"
    if has_factor and scaling.scale != "nvfp4":
        return "it computes the scales of blocks itself and can't take given ones"
    if any(side > _WIDEST or side & (side - 1) for side in block):
        return f"it takes blocks whose sides are powers of two up to {_WIDEST}, not {block}"
    return None


_REFERENCE = CastKernel(_amax, _cast)

# Obstacles get the tensor, its scaling, and whether amax or factor are given. On a CPU the
# reference goes before Triton, whose interpreter is for tests.
CAST_KERNELS: Registry[CastKernel] = Registry(
    "fp8_cast",
    (
        Candidate("cpu", _REFERENCE, cpu_obstacle),
        Candidate("triton", CastKernel(_triton_amax, _triton_cast), _triton_obstacle),
        Candidate("reference", _REFERENCE),
    ),
)
