"""Replacement of modules under all their names."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def places_of(model: nn.Module, names: Iterable[str]) -> dict[str, list[str]]:
    """Return all names of each module, as a module may be shared."""
    wanted = {id(model.get_submodule(name)): name for name in names}
    places: dict[str, list[str]] = {name: [] for name in wanted.values()}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in wanted:
            places[wanted[id(module)]].append(name)
    return places


def replaced(model: nn.Module, places: Iterable[str], layer: nn.Module) -> nn.Module:
    """Put a module in all its places, and return the model (the module itself at the root)."""
    for place in places:
        if not place:
            return layer
        parent, _, name = place.rpartition(".")
        setattr(model.get_submodule(parent), name, layer)
    return model
