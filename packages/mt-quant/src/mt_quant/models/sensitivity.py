"""Which format each layer gets, so that a model of so many bits loses least."""

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
"""What each format of each layer costs, such as how much it raises the loss."""

_UNITS = 1 << 16  # in which a budget is spent


@dataclass(frozen=True, kw_only=True)
class FormatPlan:
    """A format for each layer.

    Attributes:
        formats: By name of the layer.
        bits: Of codes, scales and zero points, for each weight on average.
        cost: The sum of what the layers' formats cost.
    """

    formats: Mapping[str, WeightFormat]
    bits: float
    cost: float

    def config(self, *, method: str = "rtn") -> QuantizationConfig:
        """Return rules by the layers' names; all other layers stay as they are.

        Args:
            method: What rounds the weights.
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
    """Return how much the measure rises when one layer alone is rounded to nearest.

    The model is measured once for each layer and format, and is as before afterwards.

    Args:
        model: With its linear layers in full precision.
        formats: That are tried; ones that do not fit a layer are left out for it.
        measure: Returns, for example, the loss on held-out data, or the divergence from the
            model's own logits; smaller is better. On several ranks all must get the same number.
        layers: Names of linear layers; all where None.

    Raises:
        QuantizationError: A name is no linear layer, no format fits one, or a measure is not
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
    """Return the bits that each layer has in each format it has a cost for, scales included."""
    shapes = _shapes(model, list(costs))
    return {
        name: {format: _bits(format, shapes[name]) for format in of_layer}
        for name, of_layer in costs.items()
    }


def choose_formats(model: nn.Module, costs: Costs, *, bits: float) -> FormatPlan:
    """Return the formats with the least sum of costs among those within a budget.

    Exact for models whose sizes have a large common divisor; else the budget is spent in 65,536
    units, each layer's share rounded up, so that it is never exceeded.

    Args:
        model: Whose layers have the costs.
        costs: As of `measure_costs`, or the output errors of the layers.
        bits: Target for each weight on average, scales and zero points included.

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
    """Choose by dynamic programming over what is spent above the smallest formats."""
    extra = {n: {f: b - min(of.values()) for f, b in of.items()} for n, of in sizes.items()}
    common = gcd(*(b for of in extra.values() for b in of.values())) or 1
    unit = max(common, -(-spare // _UNITS))
    total = spare // unit
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
    """The linear layers of these names, or all."""
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
    """Bits of a whole weight, from those of its first rows."""
    one, two = (
        quantize_weight(torch.zeros(rows, shape.whole_columns), format).nbytes for rows in (1, 2)
    )
    return 8 * (one + (two - one) * (shape.whole_rows - 1))


def _exactly(name: str) -> str:
    """The pattern of a rule for one name."""
    return f"re:{re.escape(name)}"
