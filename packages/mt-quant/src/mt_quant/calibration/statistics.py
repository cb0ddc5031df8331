"""Statistics of the inputs of a linear layer."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mt_quant.error import CalibrationError
from mt_quant.layers.shape import LinearShape


@dataclass(frozen=True, kw_only=True, eq=False)
class Statistics:
    """Statistics of a linear layer's inputs in calibration; those not collected are None.

    Attributes:
        tokens: Number of tokens.
        abs_max: Largest magnitude of each feature.
        hessian: Mean product of each pair of features.

    Shape:
        abs_max: [in]. hessian: [in, in]. Both fp32.
    """

    tokens: int
    abs_max: Tensor | None = None
    hessian: Tensor | None = None


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
        self._abs_max: Tensor | None = None
        self._products: Tensor | None = None

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Add the input of one call.

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
            largest, known = rows.abs().amax(0), self._abs_max
            self._abs_max = largest if known is None else torch.maximum(known, largest)
        if "hessian" in self.needs:
            products, known = rows.t() @ rows, self._products
            self._products = products if known is None else known.add_(products)

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
        hessian = None if self._products is None else self._products / self.tokens
        return Statistics(tokens=self.tokens, abs_max=self._abs_max, hessian=hessian)


@contextmanager
def observed(layer: nn.Module, collector: Collector) -> Iterator[None]:
    """Let a collector see the inputs of a layer."""
    handle = layer.register_forward_hook(lambda _, args, y: collector.add(args[0]))
    try:
        yield
    finally:
        handle.remove()
