"""Experts as separate linear layers, for reading and writing quantised folders."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mt_model import Sizes, Stack
from mt_moe import GroupedLinear, LinearExperts
from torch import nn

from mt_hf.family.error import ExchangeError
from mt_hf.family.link import Link
from mt_hf.reading.low_bit import StoredLayer
from mt_hf.reading.pretrained import Pretrained


def with_own_experts(model: Stack[Any], found: Pretrained) -> Pretrained:
    """Turn quantised experts of a folder into separate linear layers of the model.

    Args:
        model: The model, changed in place if the folder has such experts.
        found: The folder.

    Returns:
        The folder with the links of these layers.

    Raises:
        ExchangeError: A tensor holds several experts.
        ValueError: Ranks split experts with biases.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, GroupedLinear)]
    links = (link for name in names for link in found.links[f"{name}.weight"])
    if not any(isinstance(found.tensors[link.source], StoredLayer) for link in links):
        return found
    layers = model.unfuse_experts()
    by_target: dict[str, list[Link]] = {}
    for target, several in found.links.items():
        for link in several:
            by_target.setdefault(own_link(link, layers).target, []).append(own_link(link, layers))
        by_target.setdefault(target, [])
    return replace(found, links=by_target, shapes=own_shapes(found.shapes, found.links, layers))


def expert_layers(model: nn.Module) -> set[str]:
    """Return the names of the modules whose experts are separate layers."""
    return {name for name, module in model.named_modules() if isinstance(module, LinearExperts)}


def own_link(link: Link, layers: Collection[str]) -> Link:
    """Return a link to the layer of its expert.

    Args:
        link: Link to a parameter.
        layers: Names of the modules whose experts are separate layers; other links stay.

    Raises:
        ExchangeError: The tensor holds several experts.
    """
    base, _, leaf = link.target.rpartition(".")
    if base not in layers:
        return link
    first, end = link.box.get(0, (0, 0))
    order = link.order or (0,)
    if end - first != 1 or order[0] != 0:
        raise ExchangeError(
            f"{link.source} holds several experts of {base}, which can't be in low precision one "
            "by one; leave them out with a rule"
        )
    return replace(
        link,
        target=f"{base}.{first}.{leaf}",
        box={dim - 1: ends for dim, ends in link.box.items() if dim},
        order=None if link.order is None else tuple(dim - 1 for dim in order[1:]),
    )


def own_shapes(
    shapes: Mapping[str, Sizes], links: Mapping[str, Sequence[Link]], layers: Collection[str]
) -> dict[str, Sizes]:
    """Return the shapes of parameters, including separate layers of experts."""
    found = dict(shapes)
    for several in links.values():
        for link in several:
            own = own_link(link, layers)
            if own is not link:
                found[own.target] = shapes[link.target][1:]
    return found
