"""Named recipes: rules without a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mt_files import did_you_mean

from mt_quant.error import QuantizationError
from mt_quant.formats.format import WeightFormat
from mt_quant.rules.rule import Rule, ShapeCondition

_KEPT = Rule(
    name=r"re:(.*\.)?(lm_head|head|output_layer|router|gate|classifier|score)(\..*)?",
    optional=True,
)
"""Heads and routers stay: they have few weights, which are the most sensitive."""

_LAYERS: Mapping[str, Rule] = {
    "int8": Rule(weight="int8"),
    "int8-dynamic": Rule(weight="int8", input="int8"),
    "int4-rtn": Rule(weight="int4-g128"),
    "int8-smoothquant": Rule(weight="int8", input="int8", method="smoothquant"),
    "int4-rtn-asym": Rule(weight="int4-g128-asym"),
    "int4-gptq": Rule(weight="int4-g128", method="gptq"),
    "int4-awq": Rule(weight="int4-g128-asym", method="awq"),
    "fp8": Rule(weight="fp8", input="fp8"),
    "fp8-weight": Rule(weight="fp8"),
    "fp8-static": Rule(weight="fp8-tensor", input="fp8-static"),
    "mxfp8": Rule(weight="mxfp8", input="mxfp8"),
    "mxfp4": Rule(weight="mxfp4"),
    "nvfp4": Rule(weight="nvfp4", input="nvfp4"),
    "nvfp4-weight": Rule(weight="nvfp4"),
    "nvfp4-svdquant": Rule(weight="nvfp4", input="nvfp4", method="svdquant"),
    "w4a8": Rule(weight="int4-g128", input="int8"),
    "w4a8-fp8": Rule(weight="int4-g128", input="fp8"),
}

RECIPES: tuple[str, ...] = tuple(_LAYERS)
_GROUPS = (128, 64, 32)


def recipe(name: str, group_size: int | None = None) -> tuple[Rule, ...]:
    """Return the rules of a recipe by name; heads and routers stay as they are.

    Args:
        name: One of `RECIPES`.
        group_size: Number of neighbouring inputs that share a scale, for a recipe with groups; None
            is the largest of 128, 64 and 32 that divides a layer's inputs.

    Raises:
        QuantizationError: The name is unknown, or the recipe has no groups of this size.
    """
    if name not in _LAYERS:
        raise QuantizationError(f"unknown recipe {name!r}. {did_you_mean(name, _LAYERS)}")
    rule = _LAYERS[name]
    format = WeightFormat.named(str(rule.weight))
    if format.type != "int4":
        if group_size is not None:
            raise QuantizationError(
                f"group_size {group_size}: the recipe {name} has no groups to choose; leave it out"
            )
        return _KEPT, rule
    if group_size is not None:
        return _KEPT, replace(rule, weight=replace(format, group=group_size))
    fitting = [
        replace(
            rule,
            shape=ShapeCondition(inputs_multiple_of=size),
            weight=replace(format, group=size),
            optional=True,
        )
        for size in _GROUPS
    ]
    return _KEPT, *fitting, rule  # the last one is refused, with the layer's name
