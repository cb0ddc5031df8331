"""Exchange of quantised layers between models and checkpoints of other software."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from mt_parallel_state import shardings
from torch import Tensor, nn

from mt_quant.calibration.kv_cache import KVScheme
from mt_quant.checkpoints.compressed import describe_compressed, write_compressed
from mt_quant.checkpoints.kv_layout import common_kv_format, write_kv_scales
from mt_quant.checkpoints.stored import StoredLinear
from mt_quant.error import QuantizationError
from mt_quant.formats.format import InputFormat, WeightFormat
from mt_quant.formats.weight import QuantizedMatrix
from mt_quant.layers.linear import QuantizedLinear, tensors_of
from mt_quant.layers.shape import LinearShape, shape_of


def install(model: nn.Module, layers: Mapping[str, StoredLinear]) -> None:
    """Replace linear layers of a model by stored quantised layers; each rank takes its part.

    Args:
        model: The model, changed in place.
        layers: Whole stored layers, by the name of the layer to replace.

    Raises:
        QuantizationError: A module is no linear layer, a size differs, or a rank's part cuts a
            group.
    """
    for name, stored in layers.items():
        layer = model.get_submodule(name)
        shape = shape_of(layer, name)
        try:
            made = _layer(layer, shape, stored)
        except QuantizationError as error:
            raise QuantizationError(f"{name}: {error}") from error
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, made)
    shardings(model)


def _layer(layer: nn.Module, shape: LinearShape, stored: StoredLinear) -> QuantizedLinear:
    stored = stored.take()
    whole = shape.whole_rows, shape.whole_columns
    if stored.weight.shape != whole:
        raise QuantizationError(f"its weight is {stored.weight.shape}, and {whole} is needed")
    weight = layer.get_parameter("weight")
    matrix = QuantizedMatrix(weight=stored.weight, input_scale=stored.input_scale)
    tensors = tensors_of(matrix, shape, weight.dtype)
    if stored.step is not None:
        tensors["input_step"] = stored.step
    format = stored.weight.format
    return QuantizedLinear.from_layer(layer, shape, tensors, format=format, input=stored.input)


def compressed_state(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    *,
    kv_schemes: Mapping[str, KVScheme] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a model's tensors, and their description, in the layout of compressed-tensors.

    Args:
        model: The quantised model, on one process.
        dtype: Dtype of scales; by default the dtype of each layer's bias, or fp32 without a bias.
        kv_schemes: Schemes of keys and values by name of the attention module, all in one static
            format.

    Returns:
        Tensors by name, for a safetensors file, and the `quantization_config` of config.json.

    Raises:
        QuantizationError: A layer has a part that the layout can't store, or no layer is
            quantised.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    if not layers:
        raise QuantizationError("no layer is quantised; call quantize first")
    inside = tuple(f"{name}." for name in layers)
    tensors = {n: t for n, t in model.state_dict().items() if not n.startswith(inside)}
    formats: dict[str, tuple[WeightFormat, InputFormat | None]] = {}
    for name, layer in layers.items():
        try:
            stored = stored_layer(layer)
        except QuantizationError as error:
            raise QuantizationError(f"{name}: {error}") from error
        formats[name] = stored.weight.format, stored.input
        bias = layer.bias
        wide = dtype or (torch.float32 if bias is None else bias.dtype)
        parts = write_compressed(stored, wide)
        parts |= {} if bias is None else {"bias": bias.detach()}
        tensors |= {f"{name}.{leaf}": tensor for leaf, tensor in parts.items()}
    for name, scheme in (kv_schemes or {}).items():
        tensors |= {f"{name}.{leaf}": scale for leaf, scale in write_kv_scales(scheme).items()}
    return tensors, describe_compressed(formats, common_kv_format(kv_schemes or {}))


def stored_layer(layer: QuantizedLinear) -> StoredLinear:
    """Return a layer as checkpoints of other software store it.

    Raises:
        QuantizationError: The layer is split over ranks, or has parts that they can't store.
    """
    extras = {
        "a scale for each input feature": layer.input_scale,
        "an added product of low rank": layer.low_rank_down,
    }
    found = [name for name, value in extras.items() if value is not None]
    if found:
        raise QuantizationError(
            f"the layer has {' and '.join(found)}, which other software can't store; use a "
            "method without it, such as rtn or gptq"
        )
    if layer.shape.split is not None:
        raise QuantizationError("the layer is split over ranks; write it from one process")
    step = None if layer.input_step is None else layer.input_step.detach()
    return StoredLinear(weight=layer.quantized_weight, input=layer.input, step=step)
