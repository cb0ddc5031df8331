"""AWQ: scales of input features and clipped ranges that minimise the output's error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mt_quant.calibration.statistics import Statistics
from mt_quant.error import QuantizationError
from mt_quant.formats.format import WeightFormat
from mt_quant.formats.grid import Grid, find_grid, round_to_grid
from mt_quant.formats.weight import QuantizedMatrix, encode
from mt_quant.methods.output_error import hessian_of, row_errors

_LEAST_SIZE = 1e-4  # relative to the largest feature, so that no scale vanishes
_ROWS = 512  # outputs whose error decides between exponents


@torch.no_grad()
def awq(
    weight: Tensor,
    format: WeightFormat,
    statistics: Statistics | None = None,
    *,
    scale: bool = True,
    clip: bool = True,
    step: float = 0.05,
    least_clip: float = 0.5,
) -> QuantizedMatrix:
    """Multiply the weights of large input features before rounding, then clip each group's range.

    A grid search finds the scales and ranges with the least error of the output on the calibration
    data (AWQ, Lin et al. 2023, https://arxiv.org/abs/2306.00978). Either is left out where it does
    not help, so the error never exceeds the error of round-to-nearest.

    Args:
        weight: Any floating dtype.
        format: Number format.
        statistics: Statistics of the layer's inputs, with `hessian`.
        scale: Whether to scale features; see `awq_scale`.
        clip: Whether to clip ranges.
        step: Step of the exponents to try, from 0 to 1, and of the fractions of a range.
        least_clip: Smallest fraction of a range to try.

    Shape:
        weight: [out, in].

    Raises:
        CalibrationError: The statistics have no `hessian`.
        QuantizationError: The format does not fit, or an option is out of range.
    """
    nearest = find_grid(weight, format)
    shares = _clip_shares(step, least_clip) if clip else []
    hessian = hessian_of(statistics, weight.shape[1]).float()
    factor = awq_scale([weight], format, hessian, step=step) if scale else None
    if factor is None:
        values, grid = weight.float(), nearest
    else:
        values = weight.float() * factor
        hessian = hessian / factor / factor[:, None]
        grid = find_grid(values, format)
    if shares:
        grid = clipped_grid(values, grid, hessian, shares)
    made = encode(round_to_grid(values, grid), grid)
    return QuantizedMatrix(weight=made, input_scale=None if factor is None else 1 / factor)


@torch.no_grad()
def awq_scale(
    weights: Sequence[Tensor],
    format: WeightFormat,
    hessian: Tensor,
    *,
    step: float = 0.05,
    second_moment: Tensor | None = None,
) -> Tensor | None:
    """Return the factor of each input feature's weights before rounding.

    The factor of feature j is `rms_j ** a`. The exponent a, out of 0, step, ... 1, minimises the
    error of up to 512 evenly chosen outputs together; it is taken if the error of all outputs is
    less than without a factor.

    Args:
        weights: Weights of all layers that multiply the same input.
        format: Number format.
        hessian: Mean products of the input's features.
        step: Step between exponents.
        second_moment: Mean squares from which to compute scales; the features' own if None.

    Shape:
        weights: [out, in] each. hessian: [in, in]. second_moment: [in].
        Returns fp32 [in], or None if no scale is best.

    Raises:
        QuantizationError: The step is out of range, or there is no weight.
    """
    _check_step(step)
    if not weights:
        raise QuantizationError("a scale needs the weight of at least one layer that has the input")
    hessian = hessian.float()
    squares = hessian.diagonal() if second_moment is None else second_moment.float()
    size = squares.clamp(min=0).sqrt()
    size = size.clamp(min=_LEAST_SIZE * float(size.max()))
    if not bool(size.max() > 0):
        return None
    whole = [weight.float() for weight in weights]
    every = -(-sum(map(len, whole)) // _ROWS)
    some = [weight[::every] for weight in whole]
    best, least = None, _error(some, format, hessian)
    for i in range(1, round(1 / step) + 1):
        factor = size ** min(i * step, 1.0)
        # Only ratios matter, so the factors are centred around 1.
        factor = factor / (factor.max() * factor.min()).sqrt()
        error = _error(some, format, hessian, factor)
        if error < least:
            best, least = factor, error
    if best is None or every == 1:
        return best
    is_better = _error(whole, format, hessian, best) < _error(whole, format, hessian)
    return best if is_better else None


@torch.no_grad()
def clipped_grid(weight: Tensor, grid: Grid, hessian: Tensor, shares: Sequence[float]) -> Grid:
    """Return a grid whose groups are clipped to the fraction of their range with the least error.

    Each group is searched on its own. An output whose groups together get worse keeps the original
    grid.

    Shape:
        weight: [out, in]. hessian: [in, in].
    """
    format = grid.format
    size = grid.group_size
    blocks = torch.stack(
        [hessian[a : a + size, a : a + size] for a in range(0, weight.shape[1], size)]
    )
    best = _group_errors(weight, grid, blocks)
    keep = torch.ones_like(best)
    for share in shares:
        error = _group_errors(weight, find_grid(weight, format, shrink=share), blocks)
        keep = torch.where(error < best, share, keep)
        best = torch.minimum(error, best)
    clipped = find_grid(weight, format, shrink=keep)
    before, after = (
        row_errors(round_to_grid(weight, g) - weight, hessian) for g in (grid, clipped)
    )
    # Rows that share a scale or a level can't choose between the grids one by one.
    if format.group == "tensor" or grid.level is not None:
        return clipped if bool(after.sum() < before.sum()) else grid
    better = (after < before)[:, None]
    zero = None
    if grid.zero is not None and clipped.zero is not None:
        zero = torch.where(better, clipped.zero, grid.zero)
    return replace(grid, scale=torch.where(better, clipped.scale, grid.scale), zero=zero)


def _error(
    weights: Sequence[Tensor],
    format: WeightFormat,
    hessian: Tensor,
    factor: Tensor | float = 1.0,
) -> float:
    """Return the error of all outputs together, where features are multiplied by a factor."""
    total = 0.0
    for weight in weights:
        scaled = weight * factor
        change = (round_to_grid(scaled, find_grid(scaled, format)) - scaled) / factor
        total += float(row_errors(change, hessian).sum())
    return total


def _group_errors(weight: Tensor, grid: Grid, blocks: Tensor) -> Tensor:
    """Return the error of each group in the shape of the scales, ignoring other groups."""
    difference = (round_to_grid(weight, grid) - weight).unflatten(1, (len(blocks), -1))
    difference = difference.transpose(0, 1)
    errors = ((difference @ blocks) * difference).sum(-1).T
    return errors.sum().view(1, 1) if grid.format.group == "tensor" else errors


def _clip_shares(step: float, least: float) -> list[float]:
    if not 0 < least < 1:
        raise QuantizationError(
            f"least_clip must be between 0 and 1, got {least}; leave clipping out with clip: false"
        )
    _check_step(step)
    count = int((1 - least) / step + 1e-9)
    return [1 - i * step for i in range(1, count + 1)]


def _check_step(step: float) -> None:
    if not 0.001 <= step <= 1:
        raise QuantizationError(f"step must be 0.001 to 1, got {step}; the usual is 0.05")
