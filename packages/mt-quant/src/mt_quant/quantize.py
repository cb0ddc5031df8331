"""A model in low precision, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from mt_files import check_type
from torch import nn

from mt_quant.config import QuantizationConfig
from mt_quant.error import QuantizationError
from mt_quant.linear import QuantizedLinear
from mt_quant.method import METHODS
from mt_quant.rule import Decision
from mt_quant.shape import LinearShape


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a model is.

    Attributes:
        name: Of the layer that is finished.
        done: Layers that are.
        total: Layers that will be.
    """

    name: str
    done: int
    total: int


def quantize(
    model: nn.Module,
    config: QuantizationConfig,
    *,
    progress: Callable[[Progress], None] | None = None,
) -> nn.Module:
    """Replace a model's linear layers in place by layers in low precision.

    One layer is worked on at a time: beside the model, memory holds its whole weight in fp32 and
    what the method makes of it. A layer that is split over ranks is gathered, rounded as one rank
    does, and split again, so the result is that of one rank. Every rank of its group calls this.

    Args:
        model: Changed in place; its module at the root is replaced if that is the linear layer.
        config: Which layers, and how.
        progress: Called after each layer.

    Returns:
        The model.

    Raises:
        QuantizationError: The configuration does not fit the model. Nothing was changed.
    """
    check_type("config", config, QuantizationConfig)
    decisions = config.decide(model)
    wanted = {name: d for name, d in decisions.items() if d.weight is not None}
    places = places_of(model, wanted)
    for done, (name, decision) in enumerate(wanted.items(), start=1):
        layer = model.get_submodule(name)
        model = replaced(model, places[name], quantized_layer(name, layer, decision))
        if progress is not None:
            progress(Progress(name=name, done=done, total=len(wanted)))
    return model


@torch.no_grad()
def quantized_layer(name: str, layer: nn.Module, decision: Decision) -> QuantizedLinear:
    """Return what takes the place of a linear layer."""
    shape, format = LinearShape.of(layer), decision.weight
    if shape is None or format is None:
        raise ValueError(f"{name} is no linear layer with a format for its weight: {decision}")
    weight = shape.gathered(cast("nn.Parameter", layer.weight))
    try:
        matrix = METHODS[decision.method].function(weight, format, None, **decision.options)
    except QuantizationError as error:
        raise type(error)(f"{name}: {error}") from error
    return QuantizedLinear.from_layer(
        layer, shape, matrix, input=decision.input, output=decision.output
    )


def places_of(model: nn.Module, names: dict[str, Decision]) -> dict[str, list[str]]:
    """Return under which names each module is found, itself included: a module may be shared."""
    wanted = {id(model.get_submodule(name)): name for name in names}
    places: dict[str, list[str]] = {name: [] for name in names}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in wanted:
            places[wanted[id(module)]].append(name)
    return places


def replaced(model: nn.Module, places: list[str], layer: nn.Module) -> nn.Module:
    """Put a layer in all its places, and return the model: the layer itself, if it is the root."""
    for place in places:
        if not place:
            return layer
        parent, _, name = place.rpartition(".")
        setattr(model.get_submodule(parent), name, layer)
    return model
