"""Writing of quantised models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from mt_files import plan_safetensors
from mt_model import GPT, Stack, saved_tensors
from mt_quant import (
    InputFormat,
    KVScheme,
    LayoutWriter,
    QuantizationError,
    QuantizedLinear,
    StoredLinear,
    WeightFormat,
    common_kv_format,
    stored_layer,
    write_kv_scales,
)
from torch import Tensor, nn

from mt_hf.family.error import ExchangeError
from mt_hf.family.link import inside
from mt_hf.reading.files import read_config
from mt_hf.reading.kv_scales import written_kv_schemes
from mt_hf.reading.low_bit_layers import as_source
from mt_hf.reading.own_experts import expert_layers, own_link, own_shapes
from mt_hf.writing.export import Export
from mt_hf.writing.files import Planned

_WEIGHT = ".weight"
Formats: TypeAlias = tuple[WeightFormat, InputFormat | None]


def has_low_bits(model: Stack[Any]) -> bool:
    """Return whether a model has quantised layers, or quantised keys and values."""
    low = any(isinstance(module, QuantizedLinear) for module in model.modules())
    return low or bool(model.kv_schemes)


def write_low_bits(
    model: Stack[Any],
    export: Export,
    folder: Path,
    *,
    layout: str,
    dtype: torch.dtype,
    file_size: int,
) -> None:
    """Write a model of one process, tensor by tensor; the folder appears when it is complete.

    Args:
        model: The quantised model.
        export: Plan for the same model in full precision.
        folder: The folder to make; it must not exist, or be empty.
        layout: Layout of quantised layers.
        dtype: Dtype of scales.
        file_size: Largest size of a file's tensors, in bytes.

    Raises:
        ExchangeError: The layout can't store a layer. Nothing is left at `folder`.
    """
    try:
        chosen = LayoutWriter.of(layout)
    except QuantizationError as error:
        raise ExchangeError(str(error)) from error
    writer = _Writer(model, export, chosen, dtype)
    planned = []
    for part in export.files.values():
        for tensor in part:
            planned += writer.planned(tensor)
    planned += writer.scales()
    content, beside = writer.content()
    files = plan_safetensors(planned, file_size)
    made = replace(export, files=files, content=content, beside={**export.beside, **beside})
    made.write(folder, writer.fill)


class _Writer:
    """The tensors of a folder, made from a model's parameters."""

    def __init__(
        self, model: Stack[Any], export: Export, layout: LayoutWriter, dtype: torch.dtype
    ) -> None:
        self._layout, self._kept = layout, list[str]()
        self._export, self._dtype = _of_own_experts(export, model), dtype
        self._params = dict(saved_tensors(model))
        self._layers: dict[str, StoredLinear] = {}
        self._outputs: dict[str, int] = {}
        for name, module in model.named_modules():
            if isinstance(module, QuantizedLinear):
                self._layers[f"{name}{_WEIGHT}"] = _stored(name, module)
                self._outputs[f"{name}{_WEIGHT}"] = len(module.shape.outputs)
        self._schemes: dict[str, KVScheme] = {}
        if isinstance(model, GPT):
            self._schemes = written_kv_schemes(model, export.links)
        self._scales: dict[str, Tensor] = {}
        self._sources: dict[str, str] = {}  # the weight to which each tensor of a layer belongs
        self._formats: dict[str, Formats] = {}

    def planned(self, tensor: Planned) -> list[Planned]:
        """Return the tensors to write instead of a plain one."""
        links = self._export.links[tensor.name]
        low = [link.target in self._layers for link in links]
        if not any(low):
            if tensor.name.endswith(_WEIGHT) and len(tensor.shape) == 2:
                self._kept.append(tensor.name.removesuffix(_WEIGHT))
            return [tensor]
        if not all(low):
            raise ExchangeError(
                f"{tensor.name} is part of layers of which some are in low precision and others "
                "not; give them the same rule"
            )
        layer = self._source(tensor.name)
        formats = layer.weight.format, layer.input
        self._formats[tensor.name.removesuffix(_WEIGHT)] = formats
        made = self._parts(tensor.name, layer)
        self._sources |= dict.fromkeys(made, tensor.name)
        return [Planned(name=n, shape=tuple(t.shape), dtype=t.dtype) for n, t in made.items()]

    def scales(self) -> list[Planned]:
        """Return the scales of keys and values to write."""
        for name, scheme in self._schemes.items():
            try:
                made = write_kv_scales(scheme)
            except QuantizationError as error:
                raise ExchangeError(str(error)) from error
            names = self._layout.kv_names
            self._scales |= {f"{name}.{names.get(leaf, leaf)}": x for leaf, x in made.items()}
        scales = self._scales.items()
        return [Planned(name=n, shape=tuple(t.shape), dtype=t.dtype) for n, t in scales]

    def content(self) -> tuple[str, dict[str, bytes]]:
        """Return config.json with the description of quantised layers, and files beside it."""
        given = self._export.content
        fields = read_config(given.parent) if isinstance(given, Path) else json.loads(given)
        try:
            common = common_kv_format(self._schemes)
            told = self._layout.describe(self._formats, common, self._kept)
        except QuantizationError as error:
            raise ExchangeError(str(error)) from error
        content = json.dumps({**fields, "quantization_config": told}, indent=2) + "\n"
        return content, self._layout.files(told)

    def fill(self, name: str, into: Tensor) -> None:
        """Fill a tensor of the folder."""
        if name in self._scales:
            into.copy_(self._scales[name])
            return
        if name in self._sources:
            source = self._sources[name]
            into.copy_(self._parts(source, self._source(source))[name])
            return
        for link in self._export.links[name]:
            shape = self._export.shapes[link.target]
            whole = tuple((0, size) for size in shape)
            box = self._params[link.target].detach()[inside(link.area(shape), whole)]
            link.window(into, shape).copy_(box)

    def _source(self, name: str) -> StoredLinear:
        export = self._export
        return as_source(export.links[name], self._layers, export.shapes, self._outputs)

    def _parts(self, source: str, layer: StoredLinear) -> Mapping[str, Tensor]:
        prefix = source.removesuffix("weight")
        try:
            made = self._layout.write(layer, self._dtype)
        except QuantizationError as error:
            raise ExchangeError(f"{source}: {error}") from error
        return {f"{prefix}{leaf}": tensor for leaf, tensor in made.items()}


def _of_own_experts(export: Export, model: nn.Module) -> Export:
    """Return the plan with links to experts as separate linear layers."""
    layers = expert_layers(model)
    links = {
        name: [own_link(link, layers) for link in several] for name, several in export.links.items()
    }
    return replace(export, links=links, shapes=own_shapes(export.shapes, export.links, layers))


def _stored(name: str, layer: QuantizedLinear) -> StoredLinear:
    try:
        return stored_layer(layer)
    except QuantizationError as error:
        raise ExchangeError(f"{name}: {error}") from error
