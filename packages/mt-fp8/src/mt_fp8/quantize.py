"""From a tensor to its codes and scales: the definition, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from mt_files import check_type
from torch import Tensor

from mt_fp8.block import block_dims, in_blocks, out_of_blocks, per_block, scales_shape
from mt_fp8.element import encode, round_randomly
from mt_fp8.hadamard import check_rotates, rotate
from mt_fp8.qtensor import QTensor
from mt_fp8.recipe import Recipe, Role, recipe
from mt_fp8.scale import factor_of, known, nvfp4_scales, scale_of
from mt_fp8.scaling import Scaling

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COLUMN_SEED = 0x2545F4914F6CDD1D  # bits of their own for the second orientation


class Both(NamedTuple):
    """A tensor quantised along its rows, and its transpose along its own.

    Attributes:
        row: Of x.
        column: Of x.mT.
    """

    row: QTensor
    column: QTensor


def quantize(
    x: Tensor,
    how: Recipe | Scaling | str,
    *,
    amax: Tensor | None = None,
    factor: Tensor | None = None,
    seed: int | Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> QTensor:
    """Return a tensor's codes and scales; the tensor stays as it is.

    A number too large for its scale becomes the largest of the format, and so does an infinity.
    NaN becomes NaN; of e2m1, which has none, the whole block does.

    Args:
        x: Of fp16, bf16 or fp32; fp64 is rounded to fp32 first.
        how: A scaling; of a recipe, or of its name, that of inputs.
        amax: Magnitudes that scales are made for, of their shape; of nvfp4 that of the tensor.
            None for those of `x`. It is not looked at for what is not finite.
        factor: What elements are multiplied by, instead of what follows from amax: fp32, the shape
            of scales. For delayed scaling.
        seed: Of stochastic rounding: 63 bits, or an int64 tensor [] of them.
        group: Ranks that have other rows of the same tensor. Scales that span rows are made of the
            largest magnitude of all, an all-reduce (MAX); those of a row or block have their own.

    Shape:
        x: [..., n], as the scaling's block needs.

    Raises:
        TypeError: An argument is of another type.
        ValueError: Shapes don't fit, or the seed of stochastic rounding is missing.

    Example:
        >>> q = quantize(torch.tensor([1.0, -2.0, 4.0]), Scaling())
        >>> q.dequantize().tolist()
        [1.0, -2.0, 4.0]
    """
    scaling = scaling_of(how, "input")
    _check(x, scaling, seed)
    values = _values(x, scaling)
    blocks = in_blocks(values, scaling)
    global_scale: Tensor | None = None
    if scaling.scale == "nvfp4":
        if factor is not None:
            raise ValueError("nvfp4 makes factors of each block; pass amax instead of factor")
        total = factor_of(_tensor_amax(values, amax, group), scaling)
        of_blocks = _amax(blocks, scaling, x.shape)
        scales, factors = nvfp4_scales(of_blocks, total, scaling)
        global_scale = scale_of(total, scaling)
    else:
        shape = scales_shape(x.shape, scaling)
        if factor is None:
            found = _amax(blocks, scaling, x.shape) if amax is None else amax
            found = _fitting("amax", found, shape, x.device)
            factors = factor_of(_reduced(found, group if scaling.spans_rows else None), scaling)
        else:
            factors = _own_factor(factor, shape, x, scaling)
        scales = scale_of(factors, scaling)
    scaled = out_of_blocks(blocks * per_block(factors, scaling), x.shape, scaling)
    if seed is not None and scaling.stochastic:
        index = torch.arange(x.numel(), device=x.device).view(x.shape)
        scaled = round_randomly(scaled, scaling.elements, seed, index)
    if not scaling.elements.has_nan:
        scales = _marked(scales, blocks, scaling)
    return QTensor(
        data=encode(scaled, scaling.elements), scales=scales, scaling=scaling, dtype=x.dtype,
        shape=tuple(x.shape), global_scale=global_scale,
    )  # fmt: skip


def quantize_both(
    x: Tensor,
    how: Recipe | Scaling | str,
    role: Role = "input",
    *,
    amax: Tensor | None = None,
    factor: Tensor | None = None,
    seed: int | Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Both:
    """Quantise a tensor along its rows, and its transpose of the last two dims along its own.

    Where scales don't run along rows, codes and scales are made once and transposed. Of nvfp4 the
    largest magnitude of the tensor is found once, but where the transpose is rotated.

    Args:
        x: As in `quantize`; flatten the batch of activations first.
        how: A scaling for both; or a recipe, or its name, and then what it says of `role`.
        role: What the tensor is to a linear layer: input, weight or grad.
        amax: As in `quantize`, where scales are of the whole tensor.
        factor: As in `quantize`, where scales are of the whole tensor.
        seed: As in `quantize`. The transpose has random bits of its own.
        group: As in `quantize`.

    Shape:
        x: [..., rows, columns].

    Raises:
        TypeError: As in `quantize`.
        ValueError: As in `quantize`; or the tensor has one dim.
    """
    along, across = scaling_of(how, role), scaling_of(how, role, column=True)
    _check(x, along, seed)
    if x.dim() < 2:
        raise ValueError(f"x must have rows and columns, got the shape {tuple(x.shape)}")
    if along == across and along.is_square:
        row = quantize(x, along, amax=amax, factor=factor, seed=seed, group=group)
        return Both(row, row.transposed())
    if along.scale == across.scale == "nvfp4" and along.hadamard == across.hadamard:
        amax, group = _tensor_amax(_values(x, along), amax, group), None
    row = quantize(x, along, amax=amax, factor=factor, seed=seed, group=group)
    other = None if seed is None else seed ^ _COLUMN_SEED
    return Both(row, quantize(x.mT, across, amax=amax, factor=factor, seed=other, group=group))


def amax_of(x: Tensor, how: Recipe | Scaling | str) -> Tensor:
    """Return the largest finite magnitudes that `quantize` makes scales for; of nvfp4 the tensor's.

    Shape:
        x: [..., n]. Returns that of the scales; [] for nvfp4.

    Raises:
        TypeError: An argument is of another type.
        ValueError: The tensor has too few dims.

    Example:
        >>> amax_of(torch.tensor([[1.0, -3.0], [0.5, torch.inf]]), Scaling(block="row")).tolist()
        [[3.0], [0.5]]
    """
    scaling = scaling_of(how, "input")
    _check_tensor(x, scaling)
    values = _values(x, scaling)
    if scaling.scale == "nvfp4":
        return _tensor_amax(values, None, None)
    return _amax(in_blocks(values, scaling), scaling, x.shape)


def scaling_of(how: Recipe | Scaling | str, role: Role, *, column: bool = False) -> Scaling:
    """Return the scaling that a recipe, its name or a scaling means.

    Raises:
        TypeError: It is none of them.
        ValueError: There is no such recipe, or it leaves the role as it is.
    """
    if isinstance(how, Scaling):
        return how
    check_type("how", how, Scaling, Recipe, str)
    chosen = recipe(how) if isinstance(how, str) else how
    scaling = chosen.scaling(role, column=column)
    if scaling is None:
        raise ValueError(f"recipe {chosen.name!r} leaves {role} as it is; there is nothing to do")
    return scaling


def _check_tensor(x: Tensor, scaling: Scaling) -> None:
    check_type("x", x, Tensor)
    if x.dtype not in _DTYPES:
        listed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise TypeError(f"x must be of {listed}; got {x.dtype}")
    scales_shape(x.shape, scaling)
    if scaling.elements.per_byte > 1 and not x.dim():
        raise ValueError("a number alone has no pairs of codes; make it a row with x.view(1)")


def _check(x: Tensor, scaling: Scaling, seed: int | Tensor | None) -> None:
    _check_tensor(x, scaling)
    if not scaling.stochastic:
        return
    if seed is None:
        raise ValueError("stochastic rounding needs a seed, another for each step; pass seed=")
    check_type("seed", seed, int, Tensor)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.dim():
            raise TypeError(f"seed must be int64 [], got {seed.dtype} {tuple(seed.shape)}")
    elif not 0 <= seed < 2**63:
        raise ValueError(f"seed must be from 0 to 2^63 - 1, got {seed}")


def _values(x: Tensor, scaling: Scaling) -> Tensor:
    """Return fp32 values as they are quantised, which are rotated where that is wanted."""
    values = x.detach().to(torch.float32)
    if not scaling.hadamard:
        return values
    check_rotates(x.shape[-1])
    return rotate(values)


def _amax(blocks: Tensor, scaling: Scaling, shape: Sequence[int]) -> Tensor:
    shape = scales_shape(shape, scaling)
    if not blocks.numel():
        return blocks.new_zeros(shape)
    sizes = torch.nan_to_num(blocks.abs(), nan=0.0, posinf=0.0)
    return sizes.amax(block_dims(blocks, scaling)).view(shape)


def _tensor_amax(values: Tensor, amax: Tensor | None, group: dist.ProcessGroup | None) -> Tensor:
    if amax is None:
        amax = _amax(values, Scaling(), values.shape)
    return _reduced(_fitting("amax", amax, (), values.device), group)


def _own_factor(factor: Tensor, shape: tuple[int, ...], x: Tensor, scaling: Scaling) -> Tensor:
    if scaling.scale not in ("fp32", "pow2"):
        raise ValueError(f"factor is for scales fp32 and pow2; pass amax for {scaling.scale}")
    return _fitting("factor", factor, shape, x.device)


def _fitting(name: str, x: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    check_type(name, x, Tensor)
    if not x.is_floating_point() or tuple(x.shape) != shape:
        raise ValueError(
            f"{name} must be numbers of the shape {shape}, got {x.dtype} {tuple(x.shape)}"
        )
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, but x on {device}; use one device")
    return x.detach().to(torch.float32)


def _reduced(amax: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return amax
    amax = known(amax).clone()
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return amax


def _marked(scales: Tensor, blocks: Tensor, scaling: Scaling) -> Tensor:
    """Make NaN of the scales of blocks that have one."""
    bad = blocks.isnan().to(torch.float32)
    if not bad.numel():
        return scales
    bad = bad.amax(block_dims(blocks, scaling)).view(scales.shape) > 0
    if scales.dtype == torch.float32:
        return torch.where(bad, torch.nan, scales)
    nan = 0xFF if scales.dtype == torch.float8_e8m0fnu else 0x7F
    return torch.where(bad, nan, scales.view(torch.uint8)).view(scales.dtype)
