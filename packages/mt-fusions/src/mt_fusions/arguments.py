"""Checks of what users give: types first, then values that cannot work."""

from __future__ import annotations

import torch
from mt_files import check_type
from torch import Tensor


def check_floating(name: str, x: object) -> None:
    """Raise TypeError unless the value is a floating-point tensor."""
    check_type(name, x, Tensor)
    if isinstance(x, Tensor) and not x.is_floating_point():
        raise TypeError(f"{name} must have a floating dtype, got {x.dtype}")


def check_same(name: str, x: Tensor, other: str, y: Tensor) -> None:
    """Raise TypeError for two dtypes, and ValueError for two shapes or devices."""
    if x.dtype != y.dtype:
        raise TypeError(f"{name} is {x.dtype} and {other} {y.dtype}; convert one of them")
    if x.shape != y.shape:
        raise ValueError(f"{name} {tuple(x.shape)} must have the shape of {other} {tuple(y.shape)}")
    if x.device != y.device:
        raise ValueError(f"{name} is on {x.device}, but {other} on {y.device}; use one device")


def check_of_columns(name: str, x: object, rows: Tensor) -> None:
    """Raise where x has not one floating number for each element of a row of `rows`."""
    check_floating(name, x)
    if not isinstance(x, Tensor) or x.shape != rows.shape[-1:]:
        raise ValueError(
            f"{name} {tuple(getattr(x, 'shape', ()))} must have one number for each of the "
            f"{rows.shape[-1]} elements of a row of x {tuple(rows.shape)}"
        )
    if x.device != rows.device:
        raise ValueError(f"{name} is on {x.device}, but x on {rows.device}; use one device")


def check_range(ids: Tensor, size: int, what: str, place: str) -> None:
    """Raise for ids outside of [0, size).

    On CUDA and in a compiled graph the device raises, and the host does not wait for it.
    """
    if ids.is_meta or not ids.numel():
        return
    good = (ids >= 0) & (ids < size)
    message = f"a {what} is outside {place} of {size}: 0 to {size - 1}"
    if torch.compiler.is_compiling():
        torch._assert_async(good.all(), message)
        return
    try:  # on a CPU too, so that what stands in for a CUDA graph sees no read by the host
        torch._assert_async(good.all(), message)
    except RuntimeError:
        if ids.device.type != "cpu":
            raise
        bad = ids[~good][0].item()
        raise ValueError(f"{what} {bad} is outside {place} of {size}: 0 to {size - 1}") from None
