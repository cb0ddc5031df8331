"""Histograms of magnitudes, and the range that codes should cover."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from mt_files import did_you_mean
from torch import Tensor

from mt_quant.error import CalibrationError, QuantizationError

_BINS = 2048
_TINY = 2.0**-126
_STEPS = 100  # ranges to try for the least squared error
_STRIDE = 16  # bins between the ranges to try for the least divergence


class Magnitudes:
    """Histograms of magnitudes, one for each row, whose range grows with the values.

    The width of the bins doubles when a value lies beyond the last bin, so no value is cut off, and
    the order of the batches moves a value by at most one bin.

    Args:
        rows: Number of histograms: 1, or one for each head or feature.
        device: Device of the histograms; best the device of the values.

    Attributes:
        tokens: Number of values in each row.
        largest: Largest magnitude, exact; [rows].
        counts: Number of values in each bin; [rows, bins].
        width: Width of a bin; [rows], 0 for a row of zeros.
    """

    def __init__(self, rows: int = 1, *, device: torch.device | str = "cpu") -> None:
        if rows < 1:
            raise QuantizationError(f"rows must be at least 1, got {rows}")
        self.tokens = 0
        self.largest = torch.zeros(rows, device=device)
        self.counts = torch.zeros(rows, _BINS, dtype=torch.int64, device=device)
        self.width = torch.zeros(rows, dtype=torch.float64, device=device)

    @torch.no_grad()
    def update(self, values: Tensor) -> None:
        """Add a batch.

        Shape:
            values: [rows, n]; any shape if there is one row.

        Raises:
            QuantizationError: The values have a wrong number of rows.
            CalibrationError: A value is not finite. Nothing was added.
        """
        rows = len(self.largest)
        values = values.reshape(1, -1) if rows == 1 else values
        if values.dim() != 2 or len(values) != rows:
            raise QuantizationError(
                f"values have shape {tuple(values.shape)}, expected [{rows}, n]: a row for each "
                "histogram"
            )
        if not values.numel():
            return
        values = values.to(self.largest.device).abs().float()
        largest = values.amax(1)
        if not bool(largest.isfinite().all()):
            raise CalibrationError(
                "calibration values are not finite; the model or its calibration data gives NaN "
                "or infinity here"
            )
        self.tokens += values.shape[1]
        self.largest = torch.maximum(self.largest, largest)
        self._grow(largest.double().clamp(min=_TINY).where(largest > 0, 0.0))
        width = self.width.where(self.width > 0, 1.0)[:, None]
        index = (values / width).long().clamp(max=_BINS - 1)
        self.counts.scatter_add_(1, index, torch.ones_like(index))

    def _grow(self, largest: Tensor) -> None:
        """Double the widths until the largest values have a bin, and merge bins."""
        first = (self.width == 0) & (largest > 0)
        self.width = torch.where(first, largest / _BINS, self.width)
        ratio = largest / (self.width.where(self.width > 0, 1.0) * _BINS)
        doublings = ratio.clamp(min=1).log2().ceil().long()
        if bool((doublings > 0).any()):
            # Doubling the width k times merges 2 ** k neighbouring bins.
            merged = torch.arange(_BINS, device=largest.device) >> doublings.clamp(max=62)[:, None]
            self.counts = torch.zeros_like(self.counts).scatter_add_(1, merged, self.counts)
            self.width = self.width * 2.0**doublings

    def row(self, index: int) -> tuple[Tensor, float, float]:
        """Return the counts (on the CPU), width and largest value of one row."""
        largest = float(self.largest[index])
        return self.counts[index].cpu().double(), float(self.width[index]), largest


def find_range(
    magnitudes: Magnitudes, by: str = "max", *, percentile: float = 99.99, levels: int = 127
) -> Tensor:
    """Return the magnitude that the largest code should stand for; larger values saturate.

    Args:
        magnitudes: Histograms of the values.
        by: `max` cuts nothing off; `percentile` keeps that percentage of values; `mse` minimises
            the squared error of rounding; `entropy` minimises the Kullback-Leibler divergence of
            the rounded histogram from the original one (as TensorRT does; Migacz, 2017).
        percentile: Percentage for `by="percentile"`, above 0 and at most 100.
        levels: Largest code, for `mse` and `entropy`, which assume evenly spaced codes.

    Shape:
        Returns fp32 [rows]; 0 for a row of zeros.

    Raises:
        CalibrationError: No value was seen.
        QuantizationError: An argument is out of range.
    """
    if by not in RANGES:
        raise QuantizationError(f"unknown range {by!r}. {did_you_mean(by, RANGES)}")
    if not 0 < percentile <= 100:
        raise QuantizationError(f"percentile must be above 0 and at most 100, got {percentile}")
    if not 1 <= levels <= _BINS // 2:
        raise QuantizationError(f"levels must be 1 to {_BINS // 2}, got {levels}")
    if not magnitudes.tokens:
        raise CalibrationError("no value was seen; calibrate with at least one batch")
    found: list[float] = []
    for index in range(len(magnitudes.largest)):
        counts, width, largest = magnitudes.row(index)
        if not largest > 0:
            found.append(0.0)
            continue
        option = percentile if by == "percentile" else levels
        found.append(min(RANGES[by](counts, width, largest, option), largest))
    return torch.tensor(found, device=magnitudes.largest.device)


def _by_max(counts: Tensor, width: float, largest: float, option: float) -> float:
    del counts, width, option
    return largest


def _by_percentile(counts: Tensor, width: float, largest: float, option: float) -> float:
    """Return the upper edge of the bin that reaches the percentile."""
    del largest
    reached = counts.cumsum(0) >= counts.sum() * (option / 100)
    return (int(reached.long().argmax()) + 1) * width


def _by_error(counts: Tensor, width: float, largest: float, option: float) -> float:
    """Return the range with the least squared error of the bins' centres."""
    middles = (torch.arange(len(counts), dtype=torch.float64) + 0.5) * width
    ranges = largest * torch.arange(1, _STEPS + 1, dtype=torch.float64) / _STEPS
    steps = (ranges / option)[:, None]
    rounded = (middles / steps).round().clamp(max=option) * steps
    errors = ((rounded - middles).square() * counts).sum(1)
    return float(ranges[int(errors.argmin())])


def _by_divergence(counts: Tensor, width: float, largest: float, option: float) -> float:
    """Return the range whose histogram, merged to one bin for each code, diverges least."""
    levels, last = int(option) + 1, int(counts.nonzero().max()) + 1
    if last <= levels:
        return largest
    stops = [*range(levels, last, _STRIDE), last]
    return min(stops, key=lambda stop: _divergence(counts, stop, levels)) * width


def _divergence(counts: Tensor, stop: int, levels: int) -> float:
    """Return the divergence of a histogram cut off at a bin from its version in `levels` bins."""
    kept = counts[:stop]
    target = kept.clone()
    target[-1] += counts[stop:].sum()
    level = torch.arange(stop) * levels // stop
    there = (kept > 0).double()
    sums = torch.zeros(levels, dtype=torch.float64).index_add_(0, level, kept)
    bins = torch.zeros(levels, dtype=torch.float64).index_add_(0, level, there)
    spread = (sums / bins.clamp(min=1))[level] * there
    target, spread = target / target.sum(), spread / spread.sum().clamp(min=1)
    where = target > 0
    return float((target[where] * (target[where] / spread[where].clamp(min=1e-12)).log()).sum())


_Range: TypeAlias = Callable[[Tensor, float, float, float], float]
RANGES: Mapping[str, _Range] = {
    "max": _by_max,
    "percentile": _by_percentile,
    "mse": _by_error,
    "entropy": _by_divergence,
}
