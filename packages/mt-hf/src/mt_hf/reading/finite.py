"""Weights that are not finite are refused where they are read, with their tensor and file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mt_hf.family.error import NotFiniteError
from mt_hf.reading.tensors import StoredTensor

if TYPE_CHECKING:
    from mt_quant import StoredLinear

_LARGEST_CODE = 512.0  # no format has a larger one


def check_finite(values: Tensor, stored: StoredTensor) -> None:
    """Raise NotFiniteError for a stored tensor with a value that is not finite."""
    if values.numel() and not _is_finite(values):
        number = int((~values.isfinite()).sum())
        kind = str(values.dtype).removeprefix("torch.")
        raise NotFiniteError(
            f"{stored.path}: tensor {stored.name} has {number} of {values.numel()} values that are "
            f"not finite in {kind}; restore the file, or read it in a wider dtype"
        )


def check_finite_layer(layer: StoredLinear, dtype: torch.dtype, stored: StoredTensor) -> None:
    """Raise NotFiniteError unless all values of a quantised layer are finite in a dtype.

    They are computed only where a scale is so large that one may not be, or a code may be NaN.
    """
    weight = layer.weight
    bound = weight.grid.scale.float().abs().amax() * _LARGEST_CODE
    for factor in (weight.level, layer.input_scale):
        bound = bound if factor is None else bound * factor.float().abs().amax()
    is_small = bool(bound < torch.finfo(dtype).max)
    if not is_small or weight.format.type in ("fp8", "mxfp8"):
        check_finite(layer.dequantize(dtype), stored)


def _is_finite(values: Tensor) -> bool:
    low, high = values.aminmax()  # both are NaN if a value is, and no temporary is made
    return bool(low.isfinite() & high.isfinite())
