"""Counter-based randomness: a value depends on a key and a global index, and on nothing else.

The bits come from a splitmix64-style mixing of `index` under `key`. All arithmetic is either
integer or a single IEEE operation per step (+, -, *, /, sqrt), never a library transcendental, so
the values are equal bit for bit on every device, for any number of threads and for any way of
cutting a tensor into boxes.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Sequence

import torch
from mt_files import check_type
from mt_kernels import random_bits
from torch import Tensor, nn

from mt_parallel_state.layout import ParallelLayout
from mt_parallel_state.sharding import global_shape_of, offsets_of

_BITS = {torch.float32: 24, torch.float64: 53}


def hash_key(*parts: int | str) -> int:
    """Return a 63-bit key from any sequence of ints and strings.

    Blake2b of a type-tagged, length-prefixed encoding: `hash_key(1, 23)`, `hash_key(12, 3)`,
    `hash_key("1", 23)` and `hash_key(24)` are unrelated, unlike sums of seeds and ranks.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, int | str):
            raise TypeError(f"a key part must be an int or a str, got {part!r}")
        data = part.encode() if isinstance(part, str) else str(part).encode()
        tag = b"s" if isinstance(part, str) else b"i"
        digest.update(tag + len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little") >> 1


def random_uniform(
    key: int | Tensor, index: Tensor, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return uniform values in [0, 1), one per element of `index`.

    Args:
        key: From `hash_key`; or a tensor, int64, of one for all, where compiled graphs are to take
            others, or of one for each of a row of counters.
        index: int64 counters, for example the global element index. Not modified.
        dtype: `torch.float32` (24 random bits) or `torch.float64` (53 random bits). There is
            no bf16: with 8 bits a dropout rate would be rounded to a multiple of 1/256.

    Shape:
        index: any. Returns the same shape.
    """
    check_type("key", key, int, Tensor)
    check_type("index", index, Tensor)
    if dtype not in _BITS:
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    for name, tensor in (("key", key), ("index", index)):
        if isinstance(tensor, Tensor) and tensor.dtype != torch.int64:
            raise TypeError(f"{name} must be int64, got {tensor.dtype}")
    if torch.compiler.is_compiling():  # which fuses all of it, and needs no blocks
        return random_bits(key, index, bits=_BITS[dtype]).to(dtype) * 2.0 ** -_BITS[dtype]
    out = torch.empty(index.shape, dtype=dtype, device=index.device)
    source, target = index.reshape(-1), out.view(-1)
    chunk = _chunk(index.device)
    for start in range(0, source.numel(), chunk):
        block = slice(start, start + chunk)
        own = key[block] if isinstance(key, Tensor) and key.dim() else key
        target[block] = random_bits(own, source[block], bits=_BITS[dtype])
    return out.mul_(2.0 ** -_BITS[dtype])


def fill_normal_(
    tensor: Tensor,
    *,
    key: int,
    std: float,
    global_shape: Sequence[int],
    offsets: Sequence[int],
) -> Tensor:
    """Fill a box of a global array with normal values of mean 0 and standard deviation `std`.

    Element `g` of the global array is a function of `key` and the row-major index of `g` in
    `global_shape`. Values are drawn in fp64 (Box-Muller) and cast, so a bf16 parameter is the
    rounding of the fp32 one. Scratch memory is a few blocks, whatever the size of `tensor`.

    Args:
        tensor: The local box, overwritten.
        key: From `hash_key`.
        std: Standard deviation, at least 0.
        global_shape: Shape of the whole array.
        offsets: Start of the box in each dim.
    """
    check_type("tensor", tensor, Tensor)
    check_type("key", key, int)
    check_type("std", std, int, float)
    shape, starts = tuple(global_shape), tuple(offsets)
    _check_box(tuple(tensor.shape), shape, starts)
    if not 0 <= std <= sys.float_info.max:
        raise ValueError(f"std must be finite and at least 0, got {std}")
    with torch.no_grad():
        if std == 0:
            return tensor.zero_()
        target = tensor if tensor.is_contiguous() else torch.empty_like(tensor).contiguous()
        bases, run = _runs(tuple(tensor.shape), shape, starts, tensor.device)
        rows = target.view(bases.numel(), run)
        width = max(1, min(run, _chunk(tensor.device)))
        height = max(1, _chunk(tensor.device) // width)
        for col in range(0, run, width):
            columns = torch.arange(col, min(col + width, run), device=tensor.device)
            for row in range(0, bases.numel(), height):
                index = bases[row : row + height, None] + columns
                rows[row : row + height, col : col + width] = _normal(key, index).mul_(float(std))
        if target is not tensor:
            tensor.copy_(target)
    return tensor


def initialize_(
    param: nn.Parameter,
    *,
    seed: int,
    name: str,
    layout: ParallelLayout,
    rank: int,
    std: float,
) -> nn.Parameter:
    """Draw this rank's shard of the logical parameter `name`, the same for every layout.

    Args:
        param: Overwritten; its box in the logical parameter follows from its sharding record.
        seed: Seed of the run.
        name: Global name of the parameter, the same on every rank.
        layout: The layout of the world.
        rank: The rank that holds `param`.
        std: Standard deviation.
    """
    fill_normal_(
        param,
        key=hash_key("init", seed, name),
        std=std,
        global_shape=global_shape_of(param, layout),
        offsets=offsets_of(param, layout, rank),
    )
    return param


def _chunk(device: torch.device) -> int:
    """Return the elements per block: on a CPU a block's scratch stays in each thread's L2 cache."""
    return torch.get_num_threads() << 15 if device.type == "cpu" else 1 << 24


def _normal(key: int, index: Tensor) -> Tensor:
    """Return standard normal fp64 values by Box-Muller, one pair of uniforms per element."""
    first = random_bits(key, index, bits=53)
    second = random_bits(key ^ 0x2545F4914F6CDD1D, index, bits=53)
    radius = _log((first + 1).double() * 2.0**-53).mul_(-2.0).sqrt_()
    return radius.mul_(_cosine_turns(second.double() * 2.0**-53))


def _log(x: Tensor) -> Tensor:
    """Return the natural logarithm of positive fp64 values to 1e-14, from exact operations."""
    bits = x.view(torch.int64)
    exponent = (bits >> 52).sub_(1023)
    mantissa = (bits & ((1 << 52) - 1)).bitwise_or_(1023 << 52).view(torch.float64)
    high = mantissa > math.sqrt(2.0)
    mantissa = torch.where(high, mantissa * 0.5, mantissa)
    exponent += high
    f = (mantissa - 1.0).div_(mantissa + 1.0)  # log m = 2 atanh f, |f| < 0.172
    square = f * f
    series = torch.full_like(square, 1.0 / 17)
    for odd in range(15, 0, -2):
        series.mul_(square).add_(1.0 / odd)
    return series.mul_(f).mul_(2.0).add_(exponent.double().mul_(math.log(2.0)))


def _cosine_turns(u: Tensor) -> Tensor:
    """Return a cosine of 2 pi u up to a shift of half a turn, to about 1e-14, for u in [0, 1)."""
    # cos(2 pi u) = -sin(x) with x = 2 pi (1/4 - |u - 1/2|), and |x| <= pi / 2.
    x = (u - 0.5).abs_().neg_().add_(0.25).mul_(2.0 * math.pi)
    square = x * x
    series = torch.full_like(square, 1.0)
    for k in range(9, 0, -1):
        series.mul_(square).mul_(-1.0 / ((2 * k) * (2 * k + 1))).add_(1.0)
    return series.mul_(x)


def _check_box(local: tuple[int, ...], shape: tuple[int, ...], offsets: tuple[int, ...]) -> None:
    if not len(local) == len(shape) == len(offsets):
        raise ValueError(
            f"tensor shape {local}, global_shape {shape} and offsets {offsets} must have one entry "
            "per dim each"
        )
    for dim, (size, whole, start) in enumerate(zip(local, shape, offsets, strict=True)):
        if start < 0 or start + size > whole:
            raise ValueError(
                f"the box of shape {local} at offsets {offsets} leaves the array of shape {shape} "
                f"in dim {dim}: {start} + {size} > {whole}"
            )


def _runs(
    local: tuple[int, ...], shape: tuple[int, ...], offsets: tuple[int, ...], device: torch.device
) -> tuple[Tensor, int]:
    """Return the starts and the length of a box's contiguous runs in the global array."""
    run, first, stride = 1, 0, 1
    dim = len(local)
    while dim > 0:  # trailing dims that the box covers whole, and the first one it does not
        dim -= 1
        run *= local[dim]
        first += offsets[dim] * stride
        stride *= shape[dim]
        if local[dim] != shape[dim]:
            break
    bases = torch.full((1,), first, dtype=torch.int64, device=device)
    for outer in range(dim - 1, -1, -1):
        steps = torch.arange(offsets[outer], offsets[outer] + local[outer], device=device) * stride
        bases = (steps[:, None] + bases).view(-1)
        stride *= shape[outer]
    return bases, run
