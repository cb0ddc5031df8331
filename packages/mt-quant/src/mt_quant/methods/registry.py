"""Methods that round a weight, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from mt_files import did_you_mean, shorten
from torch import Tensor

from mt_quant.calibration.statistics import Statistics
from mt_quant.error import QuantizationError
from mt_quant.formats.format import WeightFormat
from mt_quant.formats.weight import QuantizedMatrix, quantize_weight
from mt_quant.methods.awq import awq
from mt_quant.methods.gptq import gptq
from mt_quant.methods.smoothquant import smoothquant
from mt_quant.methods.svdquant import svdquant

Rounding: TypeAlias = Callable[..., QuantizedMatrix]
"""A pure function `(weight, format, statistics, **options)` of a whole weight, [out, in].

Options are keyword-only, have defaults, and are annotated as int, float, bool or str."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method that rounds a weight.

    Attributes:
        name: Name of the method in rules.
        function: The function that rounds.
        needs: Statistics of the input that it reads: `abs_max`, `second_moment`, `hessian`.
    """

    name: str
    function: Rounding
    needs: frozenset[str] = field(default_factory=frozenset)


def rtn(
    weight: Tensor, format: WeightFormat, statistics: Statistics | None = None
) -> QuantizedMatrix:
    """Round to the nearest values.

    Shape:
        weight: [out, in].
    """
    del statistics
    return QuantizedMatrix(weight=quantize_weight(weight, format))


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method(name="rtn", function=rtn),
        Method(name="gptq", function=gptq, needs=frozenset({"hessian"})),
        Method(name="awq", function=awq, needs=frozenset({"hessian"})),
        Method(name="smoothquant", function=smoothquant, needs=frozenset({"abs_max"})),
        Method(name="svdquant", function=svdquant, needs=frozenset({"abs_max"})),
    )
}


def check_method(name: str, options: Mapping[str, Any]) -> Method:
    """Return a method by name, after checking its options.

    Raises:
        QuantizationError: The method or an option is unknown, or an option has a wrong type.
    """
    if name not in METHODS:
        raise QuantizationError(f"unknown method {name!r}. {did_you_mean(name, METHODS)}")
    method = METHODS[name]
    known = {
        parameter.name: parameter.annotation
        for parameter in inspect.signature(method.function, eval_str=True).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    for option, value in options.items():
        if option not in known:
            raise QuantizationError(
                f"method {name!r} has no option {option!r}. {did_you_mean(option, known)}"
                if known
                else f"method {name!r} has no options, got {option!r}"
            )
        kind = known[option]
        if type(value) is not kind and (kind, type(value)) != (float, int):
            raise QuantizationError(
                f"option {option!r} must be {kind.__name__}, got {shorten(value)}"
            )
    return method
