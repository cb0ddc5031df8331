"""Scales of input features that a folder has no place for, put into what makes the inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, cast

from mt_model import GPT, SharedInput
from mt_quant import CalibrationError, Decision, QuantizationConfig, Rule, fold_scales

_METHODS = ("awq", "smoothquant")


def fold_input_scales(
    model: GPT, config: QuantizationConfig, calibration: Iterable[Any] | None
) -> QuantizationConfig:
    """Do in the model what methods would add to layers: AWQ and SmoothQuant.

    Inputs are those that a norm or a linear layer makes for linear layers alone
    (`GPT.shared_inputs`); their layers share a scale. Others get none.

    Args:
        model: Changed in place; its output stays, but for rounding.
        config: Rules with such methods.
        calibration: Batches for the scales.

    Returns:
        The rules that are left: AWQ clips ranges, SmoothQuant rounds to the nearest.

    Raises:
        CalibrationError: There is such a method, and no data.
    """
    decisions = config.decide(model)
    if not any(decision.method in _METHODS for decision in decisions.values()):
        return config
    if calibration is None:
        raise CalibrationError(
            "scales of inputs (awq, smoothquant) need calibration data, and there is none; name a "
            "text with --calibration"
        )
    for decision, inputs in _alike(model, decisions):
        alpha = cast("float", decision.options.get("alpha", 0.5))
        fold_scales(
            model,
            inputs,
            calibration,
            by=cast("Literal['awq', 'smoothquant']", decision.method),
            format=decision.weight or "int4",
            alpha=alpha,
        )
    return QuantizationConfig(rules=tuple(map(_without_scales, config.rules)))


def _alike(
    model: GPT, decisions: Mapping[str, Decision]
) -> list[tuple[Decision, list[SharedInput]]]:
    """Return the inputs by the decision that all layers of each have; others are left out."""
    names = {id(module): name for name, module in model.named_modules()}
    found: list[tuple[Decision, list[SharedInput]]] = []
    for shared in model.shared_inputs():
        first, *rest = (
            replace(decisions.get(names[id(layer)], Decision()), rule=None)
            for layer in shared.layers
        )
        if first.method not in _METHODS or any(other != first for other in rest):
            continue
        if not first.options.get("scale", True):
            continue
        same = next((inputs for decision, inputs in found if decision == first), None)
        if same is None:
            found.append((first, [shared]))
        else:
            same.append(shared)
    return found


def _without_scales(rule: Rule) -> Rule:
    if rule.method == "awq":
        return replace(rule, options={**rule.options, "scale": False})
    return replace(rule, method="rtn", options={}) if rule.method == "smoothquant" else rule
