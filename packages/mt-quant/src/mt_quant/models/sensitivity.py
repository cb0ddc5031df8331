"""Choice of a format for each layer: the least loss within a budget of bits."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, isfinite
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from mt_quant.error import QuantizationError
from mt_quant.formats.format import WeightFormat
from mt_quant.formats.weight import quantize_weight
from mt_quant.layers.shape import LinearShape, shape_of
from mt_quant.rules.config import QuantizationConfig
from mt_quant.rules.rule import Rule

Costs: TypeAlias = Mapping[str, Mapping[WeightFormat, float]]
"""Cost of each format of each layer, such as the increase of the loss."""

_UNITS = 1 << 16  # resolution of the budget


@dataclass(frozen=True, kw_only=True)
class FormatPlan:
    """A format for each layer.

    Attributes:
        formats: Format of each layer, by name.
        bits: Mean number of bits for each weight, including scales and zero points.
        cost: Sum of the costs of the chosen formats.
    """

    formats: Mapping[str, WeightFormat]
    bits: float
    cost: float

    def config(self, *, method: str = "rtn") -> QuantizationConfig:
        """Return a rule for each layer; all other layers stay as they are.

        Args:
            method: Method that rounds the weights.
        """
        return QuantizationConfig(
            rules=tuple(
                Rule(name=_exactly(name), weight=format, method=method)
                for name, format in self.formats.items()
            )
        )


def measure_costs(
    model: nn.Module,
    formats: Sequence[WeightFormat | str],
    measure: Callable[[nn.Module], float],
    *,
    layers: Collection[str] | None = None,
) -> Costs:
    """Return the increase of a measure when one layer alone is rounded to nearest.

    The model is measured once for each layer and format, and is unchanged afterwards.

    Args:
        model: The model in full precision.
        formats: Formats to try; a format that does not fit a layer is left out for that layer.
        measure: Function of the model whose value should be small, such as the loss on held-out
            data or the divergence from the model's own logits. All ranks must get the same number.
        layers: Names of linear layers; None for all.

    Raises:
        QuantizationError: A name is no linear layer, no format fits a layer, or a measure is not
            finite.
    """
    chosen = [WeightFormat.named(f) if isinstance(f, str) else f for f in formats]
    shapes = _shapes(model, layers)
    before = _measured(measure, model, "the model itself")
    costs: dict[str, dict[WeightFormat, float]] = {}
    for name, shape in shapes.items():
        fitting = [format for format in chosen if _fits(model, name, format)]
        if not fitting:
            raise QuantizationError(
                f"no format of {', '.join(map(str, chosen))} fits {name} with "
                f"{shape.whole_columns} inputs; add one that does, such as int8"
            )
        costs[name] = {
            format: _with_layer(model, name, format, measure) - before for format in fitting
        }
    return costs


def weight_bits(model: nn.Module, costs: Costs) -> dict[str, dict[WeightFormat, int]]:
    """Return the number of bits of each layer in each of its formats, including scales."""
    shapes = _shapes(model, list(costs))
    return {
        name: {format: _bits(format, shapes[name]) for format in of_layer}
        for name, of_layer in costs.items()
    }


def choose_formats(model: nn.Module, costs: Costs, *, bits: float) -> FormatPlan:
    """Return the formats with the least total cost within a budget of bits.

    The choice is exact if the sizes have a large common divisor. Otherwise the budget is counted in
    65,536 units and each layer's share is rounded up, so the budget is never exceeded.

    Args:
        model: The model whose layers have the costs.
        costs: The result of `measure_costs`, or costs of your own, such as output errors.
        bits: Mean number of bits for each weight, including scales and zero points.

    Raises:
        QuantizationError: There is no cost, one is not finite, or no choice meets the target.
    """
    if not costs or not all(costs.values()):
        raise QuantizationError("costs must have at least one layer, and a format for each")
    if not all(isfinite(cost) for of_layer in costs.values() for cost in of_layer.values()):
        raise QuantizationError("costs must be finite; leave out formats that break the model")
    sizes, shapes = weight_bits(model, costs), _shapes(model, list(costs))
    weights = sum(shape.whole_rows * shape.whole_columns for shape in shapes.values())
    least = sum(min(of_layer.values()) for of_layer in sizes.values())
    if not bits * weights >= least:
        raise QuantizationError(
            f"{bits} bits for each weight can't be met: the smallest formats have "
            f"{least / weights:.3f}; raise the target or add smaller formats"
        )
    choice = _knapsack(costs, sizes, int(bits * weights) - least)
    return FormatPlan(
        formats=choice,
        bits=sum(sizes[name][format] for name, format in choice.items()) / weights,
        cost=sum(costs[name][format] for name, format in choice.items()),
    )


def _knapsack(
    costs: Costs, sizes: Mapping[str, Mapping[WeightFormat, int]], spare: int
) -> dict[str, WeightFormat]:
    """Choose by dynamic programming over the bits spent beyond the smallest formats."""
    extra = {n: {f: b - min(of.values()) for f, b in of.items()} for n, of in sizes.items()}
    common = gcd(*(b for of in extra.values() for b in of.values())) or 1
    unit = max(common, -(-spare // _UNITS))
    total = spare // unit
    # least[spent] is the lowest cost of the layers so far; `taken` remembers how to get there.
    least = torch.zeros(total + 1, dtype=torch.float64)
    taken: list[tuple[str, list[WeightFormat], Tensor]] = []
    for name, of_layer in costs.items():
        formats = list(of_layer)
        rows = torch.full((len(formats), total + 1), torch.inf, dtype=torch.float64)
        for row, format in zip(rows, formats, strict=True):
            spent = -(-extra[name][format] // unit)
            if spent <= total:
                row[spent:] = least[: total + 1 - spent] + of_layer[format]
        least, which = rows.min(0)
        taken.append((name, formats, which))
    # Walk back from the full budget through the remembered choices.
    left, choice = total, dict[str, WeightFormat]()
    for name, formats, which in reversed(taken):
        choice[name] = formats[int(which[left])]
        left -= -(-extra[name][choice[name]] // unit)
    return {name: choice[name] for name in costs}


@torch.no_grad()
def _with_layer(
    model: nn.Module, name: str, format: WeightFormat, measure: Callable[[nn.Module], float]
) -> float:
    """Measure the model with the weight of one layer rounded."""
    layer = model.get_submodule(name)
    shape, weight = shape_of(layer, name), cast("nn.Parameter", layer.weight)
    made = quantize_weight(shape.gathered(weight), format).take(*shape.own(weight.device))
    before = weight.detach().clone()
    weight.copy_(made.dequantize().view_as(weight))
    try:
        return _measured(measure, model, f"the model with {name} as {format}")
    finally:
        weight.copy_(before)


def _measured(measure: Callable[[nn.Module], float], model: nn.Module, what: str) -> float:
    value = float(measure(model))
    if not isfinite(value):
        raise QuantizationError(f"the measure of {what} is {value}; it must be finite")
    return value


def _shapes(model: nn.Module, names: Collection[str] | None) -> dict[str, LinearShape]:
    """Return the shapes of the linear layers with these names, or of all."""
    modules = dict(model.named_modules())
    found: dict[str, LinearShape] = {}
    for name in modules if names is None else names:
        shape = LinearShape.of(modules[name]) if name in modules else None
        if shape is not None:
            found[name] = shape
        elif names is not None:
            raise QuantizationError(f"the model has no linear layer {name!r}")
    if not found:
        raise QuantizationError("the model has no linear layer to choose a format for")
    return found


def _fits(model: nn.Module, name: str, format: WeightFormat) -> bool:
    try:
        QuantizationConfig(rules=(Rule(name=_exactly(name), weight=format),)).decide(model)
    except QuantizationError:
        return False
    return True


def _bits(format: WeightFormat, shape: LinearShape) -> int:
    """Return the number of bits of a whole weight, extrapolated from its first rows."""
    one, two = (
        quantize_weight(torch.zeros(rows, shape.whole_columns), format).nbytes for rows in (1, 2)
    )
    return 8 * (one + (two - one) * (shape.whole_rows - 1))


def _exactly(name: str) -> str:
    """Return the rule pattern that matches one name."""
    return f"re:{re.escape(name)}"
