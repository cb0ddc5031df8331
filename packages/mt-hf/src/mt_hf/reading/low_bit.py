"""Tensors of folders with quantised linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mt_quant import Layout, QuantizationError, StoredLinear
from torch import Tensor

from mt_hf.family.error import ExchangeError
from mt_hf.reading.tensors import StoredTensor

_CODES = (torch.float8_e4m3fn, torch.int8, torch.uint8)


@dataclass(frozen=True, kw_only=True)
class StoredLayer(StoredTensor):
    """A quantised weight of a linear layer, stored as several tensors.

    Attributes:
        layer: Name of the layer.
        parts: Tensors of the layer, by the last part of their names.
        layout: Layout of the folder.
    """

    layer: str
    parts: Mapping[str, StoredTensor]
    layout: Layout

    def read(self) -> StoredLinear:
        """Return the quantised layer.

        Raises:
            ExchangeError: A tensor is missing, or does not fit the layout.
        """
        try:
            return self.layout.read(self.layer, {leaf: t.map() for leaf, t in self.parts.items()})
        except QuantizationError as error:
            raise ExchangeError(f"{self.path}: layer {self.layer}: {error}") from error

    def map(self) -> Tensor:
        """Return the dequantised values, computed at this call."""
        return self.read().dequantize(self.dtype)


def with_layers(
    tensors: Mapping[str, StoredTensor], layout: Layout, dtype: torch.dtype
) -> dict[str, StoredTensor]:
    """Return a folder's tensors, with one dequantised weight for each quantised layer.

    Args:
        tensors: The folder's tensors by name.
        layout: Layout of the folder.
        dtype: Dtype of the dequantised values.

    Raises:
        ExchangeError: Codes are missing, or their shape is unknown.
    """
    leaves: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        layer, _, leaf = name.rpartition(".")
        if leaf == "weight" or leaf in layout.leaves:
            leaves.setdefault(layer, {})[leaf] = tensor
    found = dict(tensors)
    for layer, parts in leaves.items():
        weight = parts.get("weight")
        if set(parts) == {"weight"} and weight is not None and weight.dtype not in _CODES:
            continue
        for leaf in parts:
            del found[f"{layer}.{leaf}"]
        found[f"{layer}.weight"] = _layer(layer, parts, layout, dtype)
    return found


def _layer(
    layer: str, parts: Mapping[str, StoredTensor], layout: Layout, dtype: torch.dtype
) -> StoredLayer:
    first = next(iter(parts.values()))
    try:
        shape = layout.shape({leaf: tensor.map() for leaf, tensor in parts.items()})
    except QuantizationError as error:
        raise ExchangeError(f"{first.path}: layer {layer}: {error}") from error
    return StoredLayer(
        name=f"{layer}.weight",
        path=first.path,
        root=first.root,
        dtype=dtype,
        shape=shape,
        start=first.start,
        layer=layer,
        parts=parts,
        layout=layout,
    )


def layout_of(given: Mapping[str, Any], path: Path) -> Layout | None:
    """Return the layout of a config.json; None for plain weights.

    Raises:
        ExchangeError: The layout is unknown.
    """
    quantization = given.get("quantization_config")
    if quantization is None:
        return None
    if not isinstance(quantization, Mapping):
        raise ExchangeError(f"{path}: quantization_config is no mapping; restore it")
    try:
        return Layout.of(quantization)
    except QuantizationError as error:
        raise ExchangeError(f"{path}: {error}") from error
