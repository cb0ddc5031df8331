"""Quantised layers of a folder, as layers of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from mt_model import Sizes
from mt_quant import LinearShape, QuantizationError, StoredLinear, join_rows
from torch import Tensor, nn

from mt_hf.family.error import ExchangeError
from mt_hf.family.link import Link, inside, sizes_of
from mt_hf.reading.finite import check_finite_layer
from mt_hf.reading.low_bit import StoredLayer
from mt_hf.reading.pretrained import Pretrained
from mt_hf.reading.tensors import StoredTensor


def low_bit_layers(model: nn.Module, found: Pretrained) -> Iterator[tuple[str, StoredLinear]]:
    """Yield the linear layers of a model that a folder stores quantised, as whole layers.

    A fused layer is skipped unless all its parts are quantised.

    Raises:
        ExchangeError: A file is damaged, a value is not finite, or the parts of a layer have
            different formats.
    """
    for name, module in model.named_modules():
        target = f"{name}.weight"
        shape = LinearShape.of(module)
        links = found.links.get(target, ())
        if shape is None or not _is_low_bit(links, found.tensors):
            continue
        whole = found.shapes[target]
        places = [_places(link, whole, len(shape.outputs)) for link in links]
        known = [place for place in places if place is not None]
        if sum(len(place.rows) for place in known) == shape.whole_rows:
            dtype = module.get_parameter("weight").dtype
            yield name, _joined(name, links, known, found.tensors, dtype)


def _is_low_bit(links: Sequence[Link], tensors: Mapping[str, StoredTensor]) -> bool:
    return bool(links) and all(isinstance(tensors[x.source], StoredLayer) for x in links)


@dataclass(frozen=True, kw_only=True, eq=False)
class Place:
    """Correspondence of a source's outputs and inputs to a target's.

    Attributes:
        source_rows: Outputs of the source.
        source_columns: Inputs of the source, in the order of the target.
        rows: Outputs of the target, in the order of `source_rows`.
    """

    source_rows: Tensor
    source_columns: Tensor
    rows: Tensor


def _places(link: Link, shape: Sizes, outputs: int) -> Place | None:
    """Return the place of a link that covers all inputs of its target; None for other links."""
    area = link.area(shape)
    sizes, source = sizes_of(area), link.source_area
    order = link.order or tuple(range(len(sizes)))
    if len(source) != 2 or set(order[:outputs]) != set(range(outputs)):
        return None
    view = [0] * len(sizes)
    for size, dim in zip(sizes, order, strict=True):
        view[dim] = size
    first, second = (torch.arange(*each) for each in source)
    if prod(view[:outputs]) != len(first) or prod(sizes[outputs:]) != prod(shape[outputs:]):
        return None
    whole = tuple((0, size) for size in shape)
    rows = torch.arange(prod(shape[:outputs])).view(shape[:outputs])
    return Place(
        source_rows=first.view(view[:outputs]).permute(order[:outputs]).flatten(),
        source_columns=second.view(view[outputs:])
        .permute([dim - outputs for dim in order[outputs:]])
        .flatten(),
        rows=rows[inside(area, whole)[:outputs]].flatten(),
    )


def _joined(
    name: str,
    links: Sequence[Link],
    places: Sequence[Place],
    tensors: Mapping[str, StoredTensor],
    dtype: torch.dtype,
) -> StoredLinear:
    parts: list[StoredLinear] = []
    sources = [x for link in links if isinstance(x := tensors[link.source], StoredLayer)]
    for stored, place in zip(sources, places, strict=True):
        try:
            whole = stored.read()
            check_finite_layer(whole, dtype, stored)
            parts.append(whole.take(place.source_rows, _unless_all(place.source_columns)))
        except QuantizationError as error:
            raise ExchangeError(f"{stored.path}: layer {stored.layer}: {error}") from error
    try:
        return join_rows(parts, torch.cat([place.rows for place in places]))
    except QuantizationError as error:
        names = ", ".join(stored.layer for stored in sources)
        raise ExchangeError(f"{sources[0].path}: {name}, of {names}: {error}") from error


def _unless_all(index: Tensor) -> Tensor | None:
    """Return an index, or None if it selects everything in order."""
    return None if torch.equal(index, torch.arange(len(index))) else index


def as_source(
    links: Sequence[Link],
    layers: Mapping[str, StoredLinear],
    shapes: Mapping[str, Sizes],
    outputs: Mapping[str, int],
) -> StoredLinear:
    """Return a layer of a folder from the model's layers that contain it.

    Args:
        links: Links of the folder's tensor.
        layers: Layers of the model, by name of the weight.
        shapes: Shapes of the model's parameters.
        outputs: Number of output dims of each weight.

    Raises:
        ExchangeError: The folder stores it transposed, or the parts have different formats.
    """
    parts, rows = [], []
    for link in links:
        place = _places(link, shapes[link.target], outputs[link.target])
        if place is None:
            raise ExchangeError(
                f"{link.source} is not stored by outputs and inputs, so that {link.target} can't "
                "be written in low precision; leave it out with a rule"
            )
        columns = _unless_all(place.source_columns.argsort())
        try:
            parts.append(layers[link.target].take(place.rows, columns))
        except QuantizationError as error:
            raise ExchangeError(f"{link.source}: {error}") from error
        rows.append(place.source_rows)
    try:
        return join_rows(parts, torch.cat(rows))
    except QuantizationError as error:
        raise ExchangeError(f"{links[0].source}: {error}") from error
