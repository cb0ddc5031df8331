"""From a tensor to its codes and scales."""

from __future__ import annotations

import torch
import torch.distributed as dist
from mt_files import check_type
from mt_kernels import AUTO, Selector
from torch import Tensor

from mt_fp8.block import in_blocks, scales_shape
from mt_fp8.cast import CAST_KERNELS, CastKernel, largest, values_of
from mt_fp8.hadamard import check_rotates
from mt_fp8.job import Job
from mt_fp8.qtensor import QTensor
from mt_fp8.recipe import Recipe, Role, recipe
from mt_fp8.scale import factor_of, known, scale_of
from mt_fp8.scaling import Scaling

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def quantize(
    x: Tensor,
    how: Recipe | Scaling | str,
    *,
    amax: Tensor | None = None,
    factor: Tensor | None = None,
    seed: int | Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    kernel: str | Selector[CastKernel] = AUTO,
) -> QTensor:
    """Return a tensor's codes and scales; the tensor stays as it is.

    A number too large for its scale becomes the largest of the format, and so does an infinity.
    NaN becomes NaN; of e2m1, which has none, the whole block does.

    Args:
        x: A tensor in fp16, bf16 or fp32; fp64 is rounded to fp32 first.
        how: A scaling, or a recipe or its name, whose scaling of inputs is used.
        amax: Magnitudes to compute scales from, in the shape of the scales; for nvfp4 the whole
            tensor's. None computes them from `x`. Finite values are assumed, not checked.
        factor: What elements are multiplied by, instead of what follows from amax: fp32, the shape
            of scales. For delayed scaling.
        seed: Seed of stochastic rounding: 63 bits, or an int64 tensor [].
        group: Ranks with other rows of the same tensor. Scales that span rows use the largest
            magnitude of all ranks, an all-reduce (MAX); scales of a row or block don't need it.
        kernel: `triton`, `reference`, or `cpu`, which is the reference on a CPU; `auto` takes the
            first that serves. All have the same bits. A selector keeps its choice.

    Shape:
        x: [..., n], as the scaling's block needs.

    Raises:
        TypeError: An argument is of another type.
        ValueError: Shapes don't fit, the seed of stochastic rounding is missing, or the named
            kernel does not serve; the message says why.

    Example:
        >>> q = quantize(torch.tensor([1.0, -2.0, 4.0]), Scaling())
        >>> q.dequantize().tolist()
        [1.0, -2.0, 4.0]
    """
    scaling = scaling_of(how, "input")
    _check(x, scaling, seed)
    chosen = _chosen(kernel, x, scaling, amax if factor is None else factor)
    if factor is None:
        whole = _whole_factor(x, scaling, _reduced_amax(x, scaling, amax, group, chosen))
    else:
        whole = _own_factor(factor, x, scaling)
    job = Job(scaling, whole, seed)
    return _assembled(x, job, *chosen.cast(x, job))


def amax_of(x: Tensor, how: Recipe | Scaling | str) -> Tensor:
    """Return the largest finite magnitudes that `quantize` makes scales for; of nvfp4 the tensor's.

    Shape:
        x: [..., n]. Returns the shape of the scales; [] for nvfp4.

    Raises:
        TypeError: An argument is of another type.
        ValueError: The tensor has too few dims.

    Example:
        >>> amax_of(torch.tensor([[1.0, -3.0], [0.5, torch.inf]]), Scaling(block="row")).tolist()
        [[3.0], [0.5]]
    """
    scaling = scaling_of(how, "input")
    _check_tensor(x, scaling)
    return _amax(x, scaling, _chosen(AUTO, x, scaling, None))


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
    if scaling.hadamard:
        check_rotates(x.shape[-1])
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


def _chosen(
    kernel: str | Selector[CastKernel], x: Tensor, scaling: Scaling, given: Tensor | None
) -> CastKernel:
    has_factor = given is not None
    if isinstance(kernel, Selector):
        return kernel.find(x, scaling, has_factor, key=(scaling, has_factor)).function
    return CAST_KERNELS.find(kernel, x, scaling, has_factor).function


def _amax(x: Tensor, scaling: Scaling, kernel: CastKernel) -> Tensor:
    if scaling.block == "tensor" or scaling.scale == "nvfp4":
        return kernel.amax(x, scaling.hadamard)
    return largest(in_blocks(values_of(x, hadamard=scaling.hadamard), scaling), scaling, x.shape)


def _reduced_amax(
    x: Tensor,
    scaling: Scaling,
    amax: Tensor | None,
    group: dist.ProcessGroup | None,
    kernel: CastKernel,
) -> Tensor | None:
    """Return the magnitudes that factors are made for; None where the cast finds them."""
    if amax is None and not scaling.is_whole:
        return None
    amax = _amax(x, scaling, kernel) if amax is None else amax
    if group is None or not scaling.spans_rows:
        return amax
    amax = known(amax).clone()
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return amax


def _whole_factor(x: Tensor, scaling: Scaling, amax: Tensor | None) -> Tensor | None:
    if amax is None:
        return None
    shape = () if scaling.scale == "nvfp4" else scales_shape(x.shape, scaling)
    return factor_of(_fitting("amax", amax, shape, x.device), scaling)


def _own_factor(factor: Tensor, x: Tensor, scaling: Scaling) -> Tensor:
    if scaling.scale not in ("fp32", "pow2"):
        raise ValueError(f"factor is for scales fp32 and pow2; pass amax for {scaling.scale}")
    return _fitting("factor", factor, scales_shape(x.shape, scaling), x.device)


def _assembled(x: Tensor, job: Job, data: Tensor, scales: Tensor) -> QTensor:
    total = job.factor if job.scaling.scale == "nvfp4" else None
    return QTensor(
        data=data, scales=scales, scaling=job.scaling, dtype=x.dtype, shape=tuple(x.shape),
        global_scale=None if total is None else scale_of(total, job.scaling),
    )  # fmt: skip


def _fitting(name: str, x: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    check_type(name, x, Tensor)
    if not x.is_floating_point() or tuple(x.shape) != shape:
        raise ValueError(
            f"{name} must be numbers of the shape {shape}, got {x.dtype} {tuple(x.shape)}"
        )
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, but x on {device}; use one device")
    return x.detach().to(torch.float32)
