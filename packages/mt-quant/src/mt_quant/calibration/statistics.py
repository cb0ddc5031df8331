"""Statistics of the inputs of a linear layer."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import torch
import torch.distributed as dist
from mt_parallel_state import group_size
from torch import Tensor

from mt_quant.error import CalibrationError
from mt_quant.layers.shape import LinearShape


@dataclass(frozen=True, kw_only=True, eq=False)
class Statistics:
    """Statistics of a linear layer's inputs in calibration; those not collected are None.

    Attributes:
        tokens: Number of tokens.
        abs_max: Largest magnitude of each feature.
        second_moment: Mean square of each feature.
        hessian: Mean product of each pair of features.
        output_max: Largest magnitude of the output.

    Shape:
        abs_max, second_moment: [in]. hessian: [in, in]. output_max: []. All fp32.
    """

    tokens: int
    abs_max: Tensor | None = None
    second_moment: Tensor | None = None
    hessian: Tensor | None = None
    output_max: Tensor | None = None


class Collector:
    """Collects statistics of one layer, batch by batch.

    Inputs split over ranks are gathered, so every rank gets the statistics of the whole input.

    Args:
        name: Name of the layer, for messages.
        shape: Shape of its weight.
        needs: Names of the statistics to collect, fields of `Statistics`.
    """

    def __init__(self, name: str, shape: LinearShape, needs: Set[str]) -> None:
        self.name, self.shape, self.needs = name, shape, needs
        self.tokens = 0
        self._sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, x: Tensor, y: Tensor) -> None:
        """Add the input and output of one call.

        Raises:
            CalibrationError: A value is not finite.
        """
        rows = self.shape.whole_input(x).float()
        if not bool(rows.isfinite().all()):
            raise CalibrationError(
                f"{self.name} got an input that is not finite; look for NaN in the calibration "
                "data, or in the weights before this layer"
            )
        self.tokens += rows.shape[0]
        if "abs_max" in self.needs and rows.shape[0]:
            self._largest("abs_max", rows.abs().amax(0))
        if "output_max" in self.needs and y.numel():
            self._largest("output_max", self._output_max(y))
        if "second_moment" in self.needs:
            self._add("second_moment", rows.square().sum(0))
        if "hessian" in self.needs:
            self._add("hessian", rows.t() @ rows)

    def result(self) -> Statistics:
        """Return the statistics of all batches.

        Raises:
            CalibrationError: The layer received no input.
        """
        if not self.tokens:
            raise CalibrationError(
                f"{self.name} saw no input in calibration; give more data (an expert may be rare), "
                "or this layer a rule with method rtn and dynamic scales"
            )
        means = {
            name: total / self.tokens if name in ("second_moment", "hessian") else total
            for name, total in self._sums.items()
        }
        return Statistics(tokens=self.tokens, **means)

    def _output_max(self, y: Tensor) -> Tensor:
        largest = y.abs().amax().float()
        if self.shape.split == "outputs" and group_size(self.shape.group) > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.shape.group)
        return largest

    def _add(self, name: str, value: Tensor) -> None:
        known = self._sums.get(name)
        self._sums[name] = value if known is None else known.add_(value)

    def _largest(self, name: str, value: Tensor) -> None:
        known = self._sums.get(name)
        self._sums[name] = value if known is None else torch.maximum(known, value)
