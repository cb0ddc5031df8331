"""SVDQuant: a low-rank product in full precision, and a quantised remainder."""

from __future__ import annotations

import torch
from torch import Tensor

from mt_quant.calibration.statistics import Statistics
from mt_quant.error import QuantizationError
from mt_quant.formats.format import WeightFormat
from mt_quant.formats.grid import check_weight
from mt_quant.formats.weight import QuantizedMatrix, quantize_weight
from mt_quant.methods.output_error import needed
from mt_quant.methods.smoothquant import smoothquant_scale


@torch.no_grad()
def svdquant(
    weight: Tensor,
    format: WeightFormat,
    statistics: Statistics | None = None,
    *,
    rank: int = 32,
    alpha: float = 0.5,
    rounds: int = 1,
) -> QuantizedMatrix:
    """Smooth the weight, split off its largest singular values, and round the remainder.

    The low-rank product stays in the dtype of the weight, and the remainder is computed from the
    rounded product (SVDQuant, Li et al. 2024, https://arxiv.org/abs/2411.05007).

    Args:
        weight: Any floating dtype.
        format: Number format of the remainder.
        statistics: Statistics of the layer's inputs, with `abs_max`.
        rank: Rank of the product.
        alpha: See `smoothquant`.
        rounds: Number of times to fit the product to the rounding error; the best fit is used.

    Shape:
        weight: [out, in].

    Raises:
        CalibrationError: The statistics have no `abs_max`.
        QuantizationError: The format does not fit, or an option is out of range.
    """
    check_weight(weight)
    if not 1 <= rank <= min(weight.shape):
        raise QuantizationError(
            f"rank must be 1 to {min(weight.shape)} for a weight of {tuple(weight.shape)}, got "
            f"{rank}"
        )
    if rounds < 1:
        raise QuantizationError(f"rounds must be 1 or more, got {rounds}")
    abs_max = needed(statistics, "abs_max", (weight.shape[1],))
    factor = smoothquant_scale([weight], abs_max, alpha=alpha)
    smooth = weight.float() * factor
    target, made = smooth, []
    # Each round fits the product to what the last rounding left, and the best round counts.
    for _ in range(rounds):
        down, up = _product(target, rank, weight.dtype)
        low = up.float() @ down.float()
        rest = quantize_weight(smooth - low, format)
        target = smooth - rest.dequantize()
        error = float((target - low).square().sum())
        made.append(
            (error, QuantizedMatrix(weight=rest, input_scale=1 / factor, low_rank=(down, up)))
        )
    return min(made, key=lambda each: each[0])[1]


def _product(matrix: Tensor, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the nearest product of a rank; both factors get the root of the singular values."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    root = values[:rank].sqrt()
    return (root[:, None] * right[:rank]).to(dtype), (left[:, :rank] * root).to(dtype)
