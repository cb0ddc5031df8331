"""Errors of a layer's output, from the mean products of its inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from mt_quant.calibration.statistics import Statistics
from mt_quant.error import CalibrationError
from mt_quant.formats.weight import QuantizedMatrix


def hessian_of(statistics: Statistics | None, columns: int) -> Tensor:
    """Return the mean products of a layer's inputs, in fp64.

    Shape:
        Returns [in, in].

    Raises:
        CalibrationError: They are missing, not finite, or belong to another layer.
    """
    return needed(statistics, "hessian", (columns, columns)).double()


def needed(statistics: Statistics | None, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return one of a layer's statistics, checked.

    Raises:
        CalibrationError: It is missing, not finite, has a wrong shape, or covers no token.
    """
    found = None if statistics is None else getattr(statistics, name)
    if statistics is None or found is None:
        raise CalibrationError(
            f"this method reads `{name}` of the layer's inputs, and there is none; pass "
            "calibration data to `quantize`, or use the method rtn"
        )
    if statistics.tokens < 1:
        raise CalibrationError("the calibration data has no token; give at least one batch")
    if found.shape != shape:
        raise CalibrationError(
            f"`{name}` has shape {tuple(found.shape)}, and the layer needs {shape}; collect the "
            "statistics from this layer"
        )
    if not bool(found.isfinite().all()):
        raise CalibrationError(
            f"`{name}` has values that are not finite; the model or its calibration data gives "
            "NaN or infinity at this layer"
        )
    return found


def row_errors(difference: Tensor, hessian: Tensor) -> Tensor:
    """Return the mean squared error of each output after a change of the weight.

    Shape:
        difference: [out, in]. hessian: [in, in]. Returns [out], fp64.
    """
    difference = difference.to(hessian.dtype)
    return ((difference @ hessian) * difference).sum(1)


@torch.no_grad()
def output_error(weight: Tensor, made: QuantizedMatrix, statistics: Statistics) -> float:
    """Return the squared error of a layer's output, relative to the squared output.

    Args:
        weight: The original weight.
        made: The quantised weight.
        statistics: Statistics of the layer's inputs, with `hessian`.

    Shape:
        weight: [out, in].

    Raises:
        CalibrationError: The statistics lack `hessian`.
    """
    hessian = hessian_of(statistics, weight.shape[1])
    error = row_errors(made.dequantize().double() - weight.double(), hessian).sum()
    size = row_errors(weight.double(), hessian).sum()
    return float(error / size) if float(size) > 0 else float(torch.sign(error))
