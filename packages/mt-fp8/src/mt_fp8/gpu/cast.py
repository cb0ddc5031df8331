"""Quantising in Triton: a program reads a tile, and writes its codes and scales."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from mt_kernels import key_words
from torch import Tensor

from mt_fp8.block import scales_shape
from mt_fp8.gpu.element import encode, rotate, round_randomly
from mt_fp8.hadamard import SIGNS
from mt_fp8.job import Job
from mt_fp8.scale import SCALE_DTYPES, scale_of
from mt_fp8.scaling import Scaling

_SIGNS = sum(1 << place for place, sign in enumerate(SIGNS) if sign > 0)
_LARGEST = tl.constexpr(2.0**126)


@triton.jit
def _over(number, x):
    return tl.div_rn(tl.zeros_like(x) + number, x)


@triton.jit
def _factors(
    amax, total, KIND: tl.constexpr, UP: tl.constexpr, MAX: tl.constexpr, HIGHEST: tl.constexpr,
    MARGIN: tl.constexpr,
):  # fmt: skip
    """Return a block's scale as it is stored, and the factor of its elements."""
    if KIND == "nvfp4":
        share = tl.minimum(tl.div_rn(amax, tl.zeros_like(amax) + MAX) * total, 448.0)
        kept = encode(share, "e4m3", 448.0, CASTS=False)
        step = _decoded(kept) * _over(1.0, total)
        factor = tl.where(step > 0, _over(1.0, tl.where(step > 0, step, 1.0)), 0.0)
    elif KIND == "e8m0":
        bits = amax.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - 127 - HIGHEST + MARGIN
        if UP:  # max is 1.5 times a power of two for e2m1, and 1.75 for the others
            exponent += ((bits & 0x7FFFFF) > (0x400000 if MAX == 6.0 else 0x600000)).to(tl.int32)
        exponent = tl.minimum(tl.maximum(exponent, -127), 127)
        kept = (exponent + 127).to(tl.uint8)
        factor = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    else:
        factor = tl.minimum(_over(MAX, tl.where(amax > 0, amax, 1.0)), _LARGEST)
        if KIND == "pow2":
            factor = (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        factor = tl.maximum(factor * (2.0**-MARGIN), 1 / _LARGEST)
        factor = tl.where(amax > 0, factor, 1.0)
        kept = _over(1.0, factor)
    return kept, factor


@triton.jit
def _decoded(code):
    """The value of positive codes of e4m3."""
    code = code.to(tl.int32)
    normal = ((code << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * (2.0**-9), normal)


@triton.jit
def _kernel(
    X, Y, SCALES, FACTOR, WORDS, batch_stride, row_stride, rows, columns, blocks,
    FORMAT: tl.constexpr, MAX: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr, KIND: tl.constexpr, UP: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    MARGIN: tl.constexpr, EPS: tl.constexpr, HADAMARD: tl.constexpr, RANDOM: tl.constexpr,
    CASTS: tl.constexpr, SIGNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Quantise one tile along its rows."""
    batch = tl.program_id(2).to(tl.int64)
    top = tl.program_id(0) * TILE
    left = tl.program_id(1) * TILE
    row = top + tl.arange(0, TILE)
    column = left + tl.arange(0, TILE)
    here = (row < rows)[:, None] & (column < columns)[None, :]
    at = batch * batch_stride + row.to(tl.int64)[:, None] * row_stride + column[None, :]
    x = tl.load(X + at, mask=here, other=0.0).to(tl.float32)
    if HADAMARD:
        x = rotate(x, SIGNS, TILE, TILE)
    if KIND == "tensor":
        scaled = x * tl.load(FACTOR)
    elif KIND == "row":
        scaled = x * tl.load(FACTOR + batch * rows + row, mask=row < rows, other=1.0)[:, None]
    else:
        down: tl.constexpr = TILE // HEIGHT
        along: tl.constexpr = TILE // WIDTH
        size = tl.abs(x)
        size = tl.where(size < float("inf"), size, 0.0)
        amax = tl.max(tl.reshape(size, (TILE, along, WIDTH)), 2)
        amax = tl.max(tl.reshape(amax, (down, HEIGHT, along)), 1)
        total = 1.0
        if KIND == "nvfp4":
            total = tl.load(FACTOR)
        total = tl.zeros_like(amax) + total
        kept, factor = _factors(tl.maximum(amax, EPS), total, KIND, UP, MAX, HIGHEST, MARGIN)
        if FORMAT == "e2m1":  # which has no NaN: that of its block's scale stands for it
            bad = tl.max(tl.reshape((x != x).to(tl.int32), (TILE, along, WIDTH)), 2)
            bad = tl.max(tl.reshape(bad, (down, HEIGHT, along)), 1)
            if KIND == "nvfp4":
                kept = tl.where(bad > 0, 0x7F, kept.to(tl.int32)).to(tl.uint8)
            elif KIND == "e8m0":
                kept = tl.where(bad > 0, 0xFF, kept.to(tl.int32)).to(tl.uint8)
            else:
                kept = tl.where(bad > 0, float("nan"), kept)
        block_row = top // HEIGHT + tl.arange(0, down)
        block = left // WIDTH + tl.arange(0, along)
        width = (columns + WIDTH - 1) // WIDTH
        inside = (block_row < (rows + HEIGHT - 1) // HEIGHT)[:, None] & (block < width)[None, :]
        at = batch * blocks + block_row.to(tl.int64)[:, None] * width + block[None, :]
        tl.store(SCALES + at, kept, mask=inside)
        factor = tl.broadcast_to(
            tl.reshape(factor, (down, 1, along, 1)), (down, HEIGHT, along, WIDTH)
        )
        scaled = x * tl.reshape(factor, (TILE, TILE))
    line = batch * rows + row
    at = line[:, None] * columns + column[None, :]
    if RANDOM:
        word, word_2 = tl.load(WORDS), tl.load(WORDS + 1)
        scaled = round_randomly(scaled, at, word, word_2, MAX, MANTISSA, LOWEST)
    code = encode(scaled, FORMAT, MAX, CASTS)
    if FORMAT == "e2m1":
        width = (columns + 1) // 2
        even, odd = tl.split(tl.reshape(code, (TILE, TILE // 2, 2)))
        pair = left // 2 + tl.arange(0, TILE // 2)
        at = line[:, None] * width + pair[None, :]
        tl.store(Y + at, even | (odd << 4), mask=(row < rows)[:, None] & (pair < width)[None, :])
    else:
        tl.store(Y + at, code, mask=here)


@triton.jit
def _amax_kernel(
    X, AMAX, batch_stride, row_stride, rows, columns,
    HADAMARD: tl.constexpr, SIGNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    here = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * row_stride + column[None, :]
    x = tl.load(X + tl.program_id(2).to(tl.int64) * batch_stride + at, mask=here, other=0.0)
    x = x.to(tl.float32)
    if HADAMARD:
        x = rotate(x, SIGNS, TILE, TILE)
    size = tl.abs(x)
    size = tl.where(size < float("inf"), size, 0.0)
    tl.atomic_max(AMAX, tl.max(tl.max(size, 1), 0))


def amax(x: Tensor, *, hadamard: bool) -> Tensor:
    """Return the largest finite magnitude of a tensor, or of the rotated one; fp32 []."""
    x = _matrices(x)
    found = x.new_zeros((), dtype=torch.float32)
    tile = 64
    if x.numel():
        _amax_kernel[_grid(x, tile)](
            x, found, x.stride(0), x.stride(1), x.shape[1], x.shape[2],
            HADAMARD=hadamard, SIGNS=_SIGNS, TILE=tile, num_warps=4,
        )  # fmt: skip
    return found


def cast(x: Tensor, job: Job) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of a tensor."""
    scaling, shape, matrices = job.scaling, tuple(x.shape), _matrices(x)
    data = x.new_empty((*shape[:-1], -(-shape[-1] // scaling.elements.per_byte)), dtype=torch.uint8)
    dtype = SCALE_DTYPES[scaling.scale]
    if job.factor is None or scaling.scale == "nvfp4":
        stored = torch.uint8 if dtype.itemsize == 1 else dtype
        scales = x.new_empty(scales_shape(shape, scaling), dtype=stored)
    else:
        scales = scale_of(job.factor, scaling)
    factor = None if job.factor is None else job.factor.contiguous()
    words = None if job.seed is None else _words(job.seed, x.device)
    numbers = constants(scaling, casts=_casts(x.device))
    if x.numel():
        _kernel[_grid(matrices, numbers["TILE"])](
            matrices, data, scales, factor, words, *matrices.stride()[:2], *matrices.shape[1:],
            math.prod(scales.shape[-2:]), **numbers, num_warps=warps(numbers["TILE"]),
        )  # fmt: skip
    return data.view(scaling.elements.dtype), scales.view(dtype)


def constants(scaling: Scaling, *, casts: bool) -> dict[str, Any]:
    """Return what a kernel is compiled for.

    Args:
        scaling: Scaling of the tensor.
        casts: Whether the device rounds to both formats of FP8 itself.
    """
    form = scaling.elements
    tile = 64 if isinstance(scaling.block, str) else max(64, *scaling.block)
    height, width = (1, tile) if isinstance(scaling.block, str) else scaling.block
    return {
        "HADAMARD": scaling.hadamard,
        "FORMAT": form.name,
        "MAX": form.max,
        "MANTISSA": form.mantissa,
        "LOWEST": form.lowest,
        "HIGHEST": form.highest,
        "KIND": scaling.block if isinstance(scaling.block, str) else scaling.scale,
        "UP": scaling.exponent == "up",
        "HEIGHT": height,
        "WIDTH": width,
        "MARGIN": scaling.margin,
        "EPS": scaling.eps,
        "RANDOM": scaling.stochastic,
        "CASTS": casts,
        "SIGNS": _SIGNS,
        "TILE": tile,
    }


def warps(tile: int) -> int:
    """Return how many threads a program has, in groups of 32: each holds 32 elements."""
    return tile * tile // 1024


def _words(seed: int | Tensor, device: torch.device) -> Tensor:
    """Return the two words of a seed on the device, int64 [2]."""
    if not isinstance(seed, Tensor):
        seed = torch.tensor(seed, dtype=torch.int64, device=device)
    return torch.stack(key_words(seed))


def _casts(device: torch.device) -> bool:
    """Whether the device rounds to both formats itself, as from compute capability 8.9 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _matrices(x: Tensor) -> Tensor:
    """Return [batch, rows, columns] with elements of a row side by side."""
    x = x.detach()
    x = x.to(torch.float32) if x.dtype == torch.float64 else x
    rows = x.shape[-2] if x.dim() > 1 else 1
    x = x.reshape(math.prod(x.shape[:-2]), rows, x.shape[-1]) if x.dim() else x.reshape(1, 1, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


def _grid(x: Tensor, tile: int) -> tuple[int, int, int]:
    return triton.cdiv(x.shape[1], tile), triton.cdiv(x.shape[2], tile), x.shape[0]
