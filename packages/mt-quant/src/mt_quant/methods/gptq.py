"""GPTQ: rounding with feedback, where later columns compensate each column's error."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mt_quant.calibration.statistics import Statistics
from mt_quant.error import CalibrationError, QuantizationError
from mt_quant.formats.format import WeightFormat
from mt_quant.formats.grid import Grid, find_grid, round_to_grid
from mt_quant.formats.weight import QuantizedMatrix, QuantizedWeight, encode
from mt_quant.methods.output_error import hessian_of, row_errors

_BLOCK = 128  # columns whose feedback reaches the later columns in one product


@torch.no_grad()
def gptq(
    weight: Tensor,
    format: WeightFormat,
    statistics: Statistics | None = None,
    *,
    damping: float = 0.01,
    act_order: bool = False,
    static_groups: bool = False,
    double: bool = True,
) -> QuantizedMatrix:
    """Round column by column, and adjust the remaining columns to preserve the output.

    After column j is rounded, the remaining columns move to the least-squares solution for the
    outputs on the calibration data (GPTQ, Frantar et al. 2022, https://arxiv.org/abs/2210.17323).
    An output for which this is worse than round-to-nearest keeps round-to-nearest, so the error on
    the calibration data never exceeds it. Columns without input are rounded to nearest.

    Args:
        weight: Any floating dtype.
        format: Number format.
        statistics: Statistics of the layer's inputs, with `hessian`.
        damping: Value to add to the diagonal of the hessian, relative to its mean.
        act_order: Whether to round columns with large inputs first. Formats with groups then need
            `static_groups`, because stored groups are neighbours.
        static_groups: Whether to find the scales of all groups in the original weight, instead of
            when their first column is reached. Always on for nvfp4, whose groups share a level.
        double: Whether to factorise in fp64; fp32 is faster on a GPU.

    Shape:
        weight: [out, in].

    Raises:
        CalibrationError: The statistics have no `hessian`, or it is not positive definite.
        QuantizationError: The format does not fit, or an option is out of range.
    """
    columns = weight.shape[-1]
    grid = find_grid(weight, format)
    _check_options(format, damping, unordered=act_order and not static_groups)
    hessian = hessian_of(statistics, columns)
    order = _order(hessian, act_order=act_order)
    factor = _factor(hessian[order][:, order], damping, torch.float64 if double else torch.float32)
    refresh = isinstance(format.group, int) and not static_groups and grid.level is None
    grid_made, values = _rounded(weight.float(), grid, order, factor, refresh=refresh)
    return QuantizedMatrix(weight=_better(weight, (values, grid_made), grid, hessian))


def _check_options(format: WeightFormat, damping: float, *, unordered: bool) -> None:
    if not 0 <= damping < float("inf"):
        raise QuantizationError(f"damping must be 0 or more, got {damping}; the usual is 0.01")
    if unordered and isinstance(format.group, int):
        raise QuantizationError(
            f"act_order visits the inputs in an order of its own, and {format} stores scales of "
            "neighbours: set static_groups too"
        )


def _order(hessian: Tensor, *, act_order: bool) -> Tensor:
    if act_order:
        return torch.argsort(hessian.diagonal(), descending=True, stable=True)
    return torch.arange(len(hessian), device=hessian.device)


def _factor(hessian: Tensor, damping: float, dtype: torch.dtype) -> Tensor:
    """Return the upper triangular U for which U.T @ U is the inverse of the damped matrix."""
    hessian = hessian.to(dtype, copy=True)
    diagonal = hessian.diagonal()
    unseen = diagonal <= 0
    mean = diagonal.mean() if bool((~unseen).any()) else diagonal.new_ones(())
    # A feature without input would make the matrix singular; any positive value will do.
    diagonal[unseen] = mean.clamp(min=torch.finfo(dtype).tiny)
    diagonal += damping * mean
    lower, failed = torch.linalg.cholesky_ex(hessian)
    if not bool(failed):
        inverse = torch.cholesky_inverse(lower)
        upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
        if not bool(failed) and bool(upper.isfinite().all()):
            return upper
    raise CalibrationError(
        f"the products of the inputs, with damping {damping}, have no Cholesky factor in {dtype}; "
        f"raise `damping` (try {max(10 * damping, 0.01):g}), set `double`, or give more "
        "calibration data than the layer has inputs"
    )


def _rounded(
    weight: Tensor, grid: Grid, order: Tensor, factor: Tensor, *, refresh: bool
) -> tuple[Grid, Tensor]:
    """Round the columns in an order; return the grid, and [out, in] in the original order."""
    work = weight[:, order].to(factor.dtype)
    made = torch.empty_like(weight)
    columns, size = weight.shape[1], grid.group_size
    step = -(-_BLOCK // size) * size if refresh else _BLOCK
    places = order.tolist()
    for start in range(0, columns, step):
        stop = min(start + step, columns)
        # Feedback within a block is applied at once, and beyond it in one product at the end.
        part, own = work[:, start:stop], factor[start:stop, start:stop]
        errors = torch.empty_like(part)
        for j in range(stop - start):
            at = places[start + j]
            # The scale of a group is found when its first column has all feedback so far.
            if refresh and at % size == 0:
                fresh = find_grid(part[:, j : j + size].float(), grid.format)
                grid = grid.with_columns(at, fresh)
            column = part[:, j : j + 1]
            nearest = round_to_grid(column, grid, start=at)
            made[:, at : at + 1] = nearest
            errors[:, j : j + 1] = (column - nearest) / own[j, j]
            part[:, j:].addmm_(errors[:, j : j + 1], own[j : j + 1, j:], alpha=-1)
        work[:, stop:].addmm_(errors, factor[start:stop, stop:], alpha=-1)
    return grid, made


def _better(
    weight: Tensor, made: tuple[Tensor, Grid], nearest: Grid, hessian: Tensor
) -> QuantizedWeight:
    """Return the rounded weight, with round-to-nearest for outputs where it is better."""
    values, grid = made
    rounded = round_to_grid(weight, nearest)
    with_feedback, without = (row_errors(v - weight, hessian) for v in (values, rounded))
    worse = (with_feedback > without)[:, None]
    values = torch.where(worse, rounded, values)
    if nearest.format.group != "tensor":
        ours, theirs = grid.zero, nearest.zero
        zero = None if ours is None or theirs is None else torch.where(worse, theirs, ours)
        grid = replace(grid, scale=torch.where(worse, nearest.scale, grid.scale), zero=zero)
    return encode(values, grid)
