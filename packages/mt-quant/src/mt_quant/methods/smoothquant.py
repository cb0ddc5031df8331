"""SmoothQuant: scales that move large magnitudes from input features to weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mt_quant.calibration.statistics import Statistics
from mt_quant.error import QuantizationError
from mt_quant.formats.format import WeightFormat
from mt_quant.formats.grid import check_weight
from mt_quant.formats.weight import QuantizedMatrix, quantize_weight
from mt_quant.methods.output_error import needed


@torch.no_grad()
def smoothquant(
    weight: Tensor,
    format: WeightFormat,
    statistics: Statistics | None = None,
    *,
    alpha: float = 0.5,
) -> QuantizedMatrix:
    """Divide each input feature by a scale, and multiply its weights, before rounding.

    Useful for rules that round the input too (SmoothQuant, Xiao et al. 2022,
    https://arxiv.org/abs/2211.10438).

    Args:
        weight: Any floating dtype.
        format: Number format.
        statistics: Statistics of the layer's inputs, with `abs_max`.
        alpha: Fraction of the difficulty that moves to the weight, 0 to 1.

    Shape:
        weight: [out, in].

    Raises:
        CalibrationError: The statistics have no `abs_max`.
        QuantizationError: The format does not fit, or alpha is out of range.
    """
    check_weight(weight)
    abs_max = needed(statistics, "abs_max", (weight.shape[1],))
    factor = smoothquant_scale([weight], abs_max, alpha=alpha)
    made = quantize_weight(weight.float() * factor, format)
    return QuantizedMatrix(weight=made, input_scale=1 / factor)


@torch.no_grad()
def smoothquant_scale(weights: Sequence[Tensor], abs_max: Tensor, *, alpha: float = 0.5) -> Tensor:
    """Return the factor of each input feature's weights before rounding.

    The factor of feature j is `abs_max_j ** alpha / weight_max_j ** (1 - alpha)`; it is 1 where
    either maximum is zero.

    Args:
        weights: Weights of all layers that multiply the same input.
        abs_max: Largest magnitude of each feature.
        alpha: 0 equalises the weights, 1 the inputs.

    Shape:
        weights: [out, in] each. abs_max: [in]. Returns fp32 [in].

    Raises:
        QuantizationError: Alpha is out of range, or there is no weight.
    """
    if not 0 <= alpha <= 1:
        raise QuantizationError(f"alpha must be between 0 and 1, got {alpha}; the usual is 0.5")
    if not weights:
        raise QuantizationError("a scale needs the weight of at least one layer that has the input")
    largest = torch.stack([weight.abs().amax(0).float() for weight in weights]).amax(0)
    factor = abs_max.float() ** alpha / largest ** (1 - alpha)
    usable = (abs_max > 0) & (largest > 0) & factor.isfinite() & (factor > 0)
    return torch.where(usable, factor, 1.0)
