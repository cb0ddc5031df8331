"""Tolerances of results by dtype and kind of operation.

Tolerances are multiples of `eps = torch.finfo(dtype).eps`. They are defined once, here, so that a
test names its operation and not a number that happened to pass.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


# Multiples of eps: (fp64 and fp32, which accumulate in themselves; bf16, fp16 and fp8, which are
# rounded from an fp32 accumulation). The first grow with the square root of the number of terms
# (up to about 4096), the second count the roundings between operations.
FACTORS: Mapping[str, tuple[float, float]] = {
    "exact": (0, 0),
    "elementwise": (8, 1),
    "reduction": (64, 2),
    "norm": (64, 2),
    "softmax": (64, 2),
    "gemm": (64, 2),
    "attention": (128, 4),
    "loss": (128, 4),
    "model": (512, 8),
    "training": (4096, 16),
}


def tolerance(dtype: torch.dtype, op: str) -> float:
    """Return the tolerance of one element for a dtype and an operation, from the table.

    A result passes if `|actual - expected| <= tolerance * (|expected| + scale)`. By default `scale`
    is the root mean square of the expected values, because a sum that cancels to nearly zero keeps
    the rounding errors of its terms, which have that size.

    Args:
        dtype: Dtype of the computed values; integers and bool are always exact.
        op: A key of `FACTORS`.

    Raises:
        ValueError: Unknown `op`.
    """
    import torch

    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
    if not isinstance(op, str) or op not in FACTORS:
        raise ValueError(f"op is {op!r}; the table has {', '.join(FACTORS)}")
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    wide, narrow = FACTORS[op]
    eps = torch.finfo(dtype).eps
    return eps * (narrow if eps > torch.finfo(torch.float32).eps else wide)


def assert_close(
    actual: Any,
    expected: Any,
    *,
    op: str = "exact",
    dtype: torch.dtype | None = None,
    scale: float | None = None,
    name: str = "",
) -> None:
    """Check that two tensors, or two nested dicts or sequences of tensors, agree.

    The comparison is done in fp64, so the reference may have a wider dtype than the result.

    Args:
        actual: The computed values.
        expected: The reference, of the same structure and shapes.
        op: The kind of operation, a key of `FACTORS`.
        dtype: Dtype of the tolerance, if the values went through a narrower dtype than
            `actual.dtype`, the default.
        scale: Size of the summed terms; the root mean square of `expected` by default. An all-zero
            reference allows no error at all unless a scale is given.
        name: Prefix of the message.

    Raises:
        AssertionError: Naming the place, the worst element and the tolerance.
    """
    __tracebackhide__ = True
    check = functools.partial(assert_close, op=op, dtype=dtype, scale=scale)
    if isinstance(expected, Mapping):
        if not isinstance(actual, Mapping) or actual.keys() != expected.keys():
            keys = sorted(actual) if isinstance(actual, Mapping) else type(actual).__name__
            raise AssertionError(f"{name or 'actual'}: {keys} is not {sorted(expected)}")
        for key in expected:
            check(actual[key], expected[key], name=f"{name}[{key!r}]")
    elif isinstance(expected, Sequence) and not isinstance(expected, str):
        if not isinstance(actual, Sequence) or len(actual) != len(expected):
            raise AssertionError(f"{name or 'actual'}: {actual!r} has not {len(expected)} items")
        for index, (left, right) in enumerate(zip(actual, expected, strict=True)):
            check(left, right, name=f"{name}[{index}]")
    else:
        _assert_tensors_close(actual, expected, op=op, dtype=dtype, scale=scale, name=name)


def _assert_tensors_close(
    actual: Any,
    expected: Any,
    *,
    op: str,
    dtype: torch.dtype | None,
    scale: float | None,
    name: str,
) -> None:
    __tracebackhide__ = True
    import torch

    actual, expected = torch.as_tensor(actual).detach(), torch.as_tensor(expected).detach()
    prefix = f"{name}: " if name else ""
    if actual.shape != expected.shape:
        raise AssertionError(
            f"{prefix}shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        )
    bound = tolerance(dtype or actual.dtype, op)
    kind = torch.complex128 if actual.is_complex() or expected.is_complex() else torch.float64
    if bound == 0.0 and actual.dtype == expected.dtype:
        kind = actual.dtype  # fp64 cannot represent all values of int64 and uint64
    left, right = actual.cpu().to(kind), expected.cpu().to(kind)
    if scale is None:
        scale = _root_mean_square(right)
    if bound == 0.0:
        wrong = (left != right) & ~(left.isnan() & right.isnan())
    else:
        allowed = bound * right.abs() + bound * scale
        near = left.isfinite() & right.isfinite() & ((left - right).abs() <= allowed)
        near |= left == right  # equal infinities
        wrong = ~(near | (left.isnan() & right.isnan()))
    if not bool(wrong.any()):
        return
    error = torch.where(wrong, (left.to(torch.float64) - right.to(torch.float64)).abs(), -1.0)
    error = torch.nan_to_num(error, nan=torch.inf)
    place = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    raise AssertionError(
        f"{prefix}{int(wrong.sum())} of {wrong.numel()} elements differ; the worst at "
        f"{list(place)}: {left[place].item()} instead of {right[place].item()}. "
        f"Allowed for op={op!r} in {dtype or actual.dtype}: {bound:.3g} relative plus "
        f"{bound * scale:.3g} ({bound:.3g} x scale {scale:.3g})"
    )


def _root_mean_square(values: torch.Tensor) -> float:
    import torch

    if values.numel() == 0 or not (values.is_floating_point() or values.is_complex()):
        return 0.0
    finite = values[values.isfinite()].abs().to(torch.float64)
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0
