"""Loading of a quantised model from its state dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from mt_files import check_type
from mt_parallel_state import shardings
from torch import Tensor, nn

from mt_quant.error import QuantizationError
from mt_quant.formats.format import WeightFormat
from mt_quant.layers.linear import CODES, QuantizedLinear, dims_of
from mt_quant.layers.shape import shape_of
from mt_quant.models.places import places_of, replaced
from mt_quant.rules.config import QuantizationConfig
from mt_quant.rules.rule import Decision


def load_quantized(
    model: nn.Module, config: QuantizationConfig, state: Mapping[str, Tensor]
) -> nn.Module:
    """Turn a model in full precision into the quantised model of a state dict.

    The model's weights are not read, and may be on the meta device.

    Args:
        model: A model in full precision, changed in place. If the model itself is a linear layer,
            the returned module replaces it.
        config: The rules by which the saved model was quantised.
        state: `state_dict()` of the quantised model on the same rank.

    Returns:
        The model.

    Raises:
        QuantizationError: The state lacks tensors, has unknown ones, or they do not fit. Nothing
            was changed.

    Example:
        >>> from mt_quant import quantize
        >>> int8 = QuantizationConfig.named("int8")
        >>> state = quantize(nn.Sequential(nn.Linear(4, 2)), int8).state_dict()
        >>> load_quantized(nn.Sequential(nn.Linear(4, 2)), int8, state)[0].format.type
        'int8'
    """
    check_type("config", config, QuantizationConfig)
    decisions = {n: d for n, d in config.decide(model).items() if d.weight is not None}
    made = {
        name: _layer(name, model.get_submodule(name), decision, state)
        for name, decision in decisions.items()
    }
    places = places_of(model, made)
    _check_names(model, made, places, set(state))
    is_meta = any(param.is_meta for param in model.parameters())
    for name, layer in made.items():
        model = replaced(model, places[name], layer)
    # With `assign`, meta parameters are replaced, and their records with them.
    shardings(model)
    model.load_state_dict(dict(state), assign=is_meta)
    shardings(model)  # restores the records of assigned parameters
    return model


def _layer(
    name: str, layer: nn.Module, decision: Decision, state: Mapping[str, Tensor]
) -> QuantizedLinear:
    shape, format = shape_of(layer, name), cast("WeightFormat", decision.weight)
    prefix = f"{name}." if name else ""
    names = [key for key in CODES if f"{prefix}{key}" in state]
    try:
        tensors = {
            key: shape.unbox(state[f"{prefix}{key}"].detach(), dims_of(key, format))
            for key in names
        }
        return QuantizedLinear.from_layer(
            layer, shape, tensors, format=format, input=decision.input
        )
    except QuantizationError as error:
        raise QuantizationError(f"{name}: {error}") from error


def _check_names(
    model: nn.Module,
    made: Mapping[str, QuantizedLinear],
    places: Mapping[str, list[str]],
    given: set[str],
) -> None:
    """Refuse a state whose names differ from the names of the model with its new layers."""
    expected = set(model.state_dict())
    for name, layer in made.items():
        before = model.get_submodule(name).state_dict()
        for place in places[name]:
            prefix = f"{place}." if place else ""
            expected -= {f"{prefix}{key}" for key in before}
            expected |= {f"{prefix}{key}" for key in layer.state_dict()}
    if expected != given:
        missing, more = sorted(expected - given), sorted(given - expected)
        raise QuantizationError(
            f"the state lacks {len(missing)} tensors ({', '.join(missing[:5])}) and has "
            f"{len(more)} more ({', '.join(more[:5])}); load it with the rules and the model that "
            "made it"
        )
