"""AWQ and SmoothQuant without scales in the layers: they are folded into the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, cast

from torch import nn

from mt_quant.error import CalibrationError
from mt_quant.layers.shared_input import SharedInput
from mt_quant.models.folding import fold_scales
from mt_quant.rules.config import QuantizationConfig
from mt_quant.rules.rule import Decision, Rule

_METHODS = ("awq", "smoothquant")


def fold_input_scales(
    model: nn.Module,
    inputs: Iterable[SharedInput],
    config: QuantizationConfig,
    calibration: Iterable[Any] | None,
) -> QuantizationConfig:
    """Fold the scales of a configuration's AWQ and SmoothQuant rules into the model.

    Checkpoints of other software have no place for the scale of a layer's input. Layers that share
    an input share its scale; an input whose layers have different rules gets none.

    Args:
        model: Changed in place; its output stays the same but for rounding.
        inputs: The inputs whose scale can be folded; see `fold_scales`.
        config: The rules.
        calibration: Batches for the scales; needed where a rule has such a method.

    Returns:
        The remaining rules: AWQ then clips ranges only, and SmoothQuant rounds to nearest.

    Raises:
        CalibrationError: A rule has such a method, and there is no data.
    """
    decisions = config.decide(model)
    if not any(decision.method in _METHODS for decision in decisions.values()):
        return config
    if calibration is None:
        raise CalibrationError(
            "awq and smoothquant need calibration data for the scales of inputs, and there is "
            "none; pass batches (a command: --calibration)"
        )
    names = {id(module): name for name, module in model.named_modules()}
    for decision, alike in _by_decision(inputs, decisions, names):
        fold_scales(
            model,
            alike,
            calibration,
            by=cast("Literal['awq', 'smoothquant']", decision.method),
            format=decision.weight or "int4",
            alpha=cast("float", decision.options.get("alpha", 0.5)),
        )
    return QuantizationConfig(rules=tuple(map(_without_scales, config.rules)))


def _by_decision(
    inputs: Iterable[SharedInput], decisions: Mapping[str, Decision], names: Mapping[int, str]
) -> list[tuple[Decision, list[SharedInput]]]:
    """Group inputs by the decision that all their layers share, and leave out the others."""
    found: list[tuple[Decision, list[SharedInput]]] = []
    for shared in inputs:
        first, *rest = (
            replace(decisions.get(names[id(layer)], Decision()), rule=None)
            for layer in shared.layers
        )
        if first.method not in _METHODS or any(other != first for other in rest):
            continue
        if not first.options.get("scale", True):
            continue
        same = next((alike for decision, alike in found if decision == first), None)
        if same is None:
            found.append((first, [shared]))
        else:
            same.append(shared)
    return found


def _without_scales(rule: Rule) -> Rule:
    if rule.method == "awq":
        return replace(rule, options={**rule.options, "scale": False})
    return replace(rule, method="rtn", options={}) if rule.method == "smoothquant" else rule
