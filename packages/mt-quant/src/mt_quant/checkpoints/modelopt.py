"""The layout of NVIDIA's Model Optimizer, which TensorRT-LLM, vLLM and SGLang read.

Source: the `quantization_config` and `hf_quant_config.json` that its export of Hugging Face folders
writes, and the tensors that vLLM's `modelopt` method reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from mt_files import shorten
from torch import Tensor

from mt_quant.checkpoints.compressed import block_weight, float_weight, nvfp4_weight, scaled_weight
from mt_quant.checkpoints.stored import (
    StoredLinear,
    check_e4m3,
    check_shape,
    integer_weight,
    needed,
)
from mt_quant.error import QuantizationError
from mt_quant.formats.format import InputFormat, WeightFormat
from mt_quant.formats.kv_format import KVFormat

METHOD = "modelopt"
LEAVES = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")
MIXED = "MIXED_PRECISION"
BLOCKS_ALONE = "FP8_PB_WO"
_BLOCK = (128, 128)
# The name of each pair of formats, of weight and input.
_ALGORITHMS: Mapping[tuple[str, str], str] = {
    ("fp8-tensor", "fp8-static"): "FP8",
    ("fp8-channel", "fp8-token"): "FP8_PER_CHANNEL_PER_TOKEN",
    ("mxfp8", "mxfp8"): "MXFP8",
    ("nvfp4", "None"): "W4A16_NVFP4",
}
# Read only: what the weights of AWQ and SmoothQuant are, beside a factor for each input feature.
_NVFP4 = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ")
_SMOOTHED = "W8A8_SQ_PER_CHANNEL"
_GROUPS: Mapping[str, int] = {"MXFP8": 32, "W4A16_NVFP4": 16}
KV_NAMES: Mapping[str, str] = {"k_scale": "k_proj.k_scale", "v_scale": "v_proj.v_scale"}


def describe_modelopt(
    layers: Mapping[str, tuple[WeightFormat, InputFormat | None]],
    kv_cache: KVFormat | None = None,
    kept: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the `quantization_config` of config.json.

    Args:
        layers: Formats of weight and input of each quantised layer, by name.
        kv_cache: Format of all keys and values; None leaves them.
        kept: Names of the other modules with a matrix.

    Raises:
        QuantizationError: The layout does not have a format.
    """
    chosen = {name: _algorithm(*formats) for name, formats in layers.items()}
    found = dict.fromkeys(chosen.values())
    groups = {
        f"group_{index}": {
            **_scheme(name),
            "targets": [layer for layer in chosen if chosen[layer] == name],
        }
        for index, name in enumerate(found)
    }
    described: dict[str, Any] = {"quant_method": METHOD, "config_groups": groups}
    described |= {"ignore": list(kept), "producer": {"name": METHOD, "version": "mt-quant"}}
    if len(found) > 1:
        described["quantized_layers"] = {name: _algorithm_fields(chosen[name]) for name in chosen}
        described["quant_algo"] = MIXED
    elif found:
        described |= _algorithm_fields(next(iter(found)))
    if kv_cache is not None:
        _check_kv_cache(kv_cache)
        described["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return described


def files_of(described: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files beside config.json by name: the same description for older readers."""
    kept = ("quant_algo", "group_size", "quantized_layers")
    inner = {key: described[key] for key in kept if key in described}
    inner["kv_cache_quant_algo"] = "FP8" if "kv_cache_scheme" in described else None
    inner["exclude_modules"] = described["ignore"]
    told = {"producer": described["producer"], "quantization": inner}
    return {"hf_quant_config.json": (json.dumps(told, indent=2) + "\n").encode()}


def write_modelopt(layer: StoredLinear, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a layer by the last part of their names.

    Args:
        layer: The quantised layer.
        dtype: Not used, as the layout fixes all dtypes.
    """
    del dtype
    weight, name = layer.weight, _algorithm(layer.weight.format, layer.input)
    if name == "W4A16_NVFP4":
        level = needed({} if weight.level is None else {"level": weight.level}, "level")[0]
        scale = weight.scale.view(torch.float8_e4m3fn)
        return {"weight": weight.data, "weight_scale": scale, "weight_scale_2": level.view(())}
    made = {"weight": weight.data.view(torch.float8_e4m3fn)}
    shapes = {"FP8": (), "FP8_PER_CHANNEL_PER_TOKEN": (-1,)}
    made["weight_scale"] = weight.scale.view(shapes.get(name, weight.scale.shape))
    if layer.step is not None:
        made["input_scale"] = layer.step.float().view(())
    return made


def read_modelopt(
    config: Mapping[str, Any], name: str, tensors: Mapping[str, Tensor]
) -> StoredLinear:
    """Return a layer from its tensors and the `quantization_config`.

    Raises:
        QuantizationError: A tensor is missing or has a wrong shape, or the algorithm is unknown.
    """
    found = _read_weight(_algorithm_of(config, name), tensors)
    factors = tensors.get("pre_quant_scale")
    if factors is None:
        return found
    check_shape("pre_quant_scale", factors, (found.weight.shape[1],))
    return replace(found, input_scale=factors.float())


def _read_weight(algorithm: str | None, tensors: Mapping[str, Tensor]) -> StoredLinear:
    data, scale = needed(tensors, "weight", "weight_scale")
    if algorithm in _NVFP4:
        level = needed(tensors, "weight_scale_2")[0].float().view(1, 1)
        return StoredLinear(weight=nvfp4_weight(data, scale, level))
    if algorithm == _SMOOTHED:
        return _smoothed(data, scale, tensors.get("input_scale"))
    if algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8", BLOCKS_ALONE):
        able = (*_ALGORITHMS.values(), *_NVFP4, _SMOOTHED, BLOCKS_ALONE)
        known = ", ".join(dict.fromkeys(able))
        raise QuantizationError(
            f"quant_algo {shorten(algorithm)} is not supported; use one of {known}"
        )
    check_e4m3("weight", data)
    if algorithm == "MXFP8":
        check_shape("weight_scale", scale, (data.shape[0], data.shape[1] // 32))
        weight = float_weight(data, scale, WeightFormat(type="mxfp8", group=32))
        return StoredLinear(weight=weight, input=InputFormat(type="mxfp8", group="block"))
    if algorithm == BLOCKS_ALONE:
        boxes = [-(-size // block) for size, block in zip(data.shape, _BLOCK, strict=True)]
        if scale.dim() != len(boxes) and scale.numel() == math.prod(boxes):
            scale = scale.view(boxes)  # with further dims of one element, or without those
        return StoredLinear(weight=block_weight(data, scale, _BLOCK))
    weight, step = scaled_weight(data, scale), tensors.get("input_scale")
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return StoredLinear(weight=weight, input=InputFormat(type="fp8", group="token"))
    if step is None:
        return StoredLinear(weight=weight)
    input = InputFormat(type="fp8", group="tensor", dynamic=False)
    return StoredLinear(weight=weight, input=input, step=step.float().view(1, 1))


def _smoothed(data: Tensor, scale: Tensor, step: Tensor | None) -> StoredLinear:
    """Return a weight in int8 with a scale for each output."""
    if data.dtype != torch.int8:
        raise QuantizationError(f"weight is {data.dtype}, and torch.int8 is needed")
    check_shape("weight_scale", scale, (data.shape[0],))
    codes = (data.to(torch.int16) + 128).to(torch.uint8)
    weight = integer_weight(codes, scale.view(-1, 1), None, 8)
    if step is None:
        return StoredLinear(weight=weight)
    input = InputFormat(type="int8", group="tensor", dynamic=False)
    return StoredLinear(weight=weight, input=input, step=step.float().view(1, 1))


def _algorithm_of(config: Mapping[str, Any], name: str) -> str | None:
    inner = config.get("quantization", config)
    found = inner.get("quant_algo") if isinstance(inner, Mapping) else None
    if found == MIXED:
        layers = inner.get("quantized_layers")
        own = layers.get(name) if isinstance(layers, Mapping) else None
        found = own.get("quant_algo") if isinstance(own, Mapping) else None
        if found is None:
            raise QuantizationError(
                f"{name} has codes, but quantized_layers does not name it; restore config.json"
            )
    return found.upper() if isinstance(found, str) else None


def _algorithm(weight: WeightFormat, input: InputFormat | None) -> str:
    found = _ALGORITHMS.get((str(weight), str(input)))
    if found is not None:
        return found
    able = "; ".join(
        f"{pair[0]} with " + (f"inputs {pair[1]}" if pair[1] != "None" else "inputs as they are")
        for pair in _ALGORITHMS
    )
    inputs = "inputs as they are" if input is None else f"inputs {input}"
    raise QuantizationError(
        f"the layout of ModelOpt has no {weight} with {inputs}; it has {able}; use one of these, "
        "or the layout compressed-tensors"
    )


def _algorithm_fields(algorithm: str) -> dict[str, Any]:
    size = _GROUPS.get(algorithm)
    return {"quant_algo": algorithm, **({} if size is None else {"group_size": size})}


def _scheme(algorithm: str) -> dict[str, Any]:
    bits = 4 if algorithm == "W4A16_NVFP4" else 8
    made: dict[str, Any] = {"num_bits": bits, "type": "float", "dynamic": False}
    if algorithm in _GROUPS:
        made["group_size"] = _GROUPS[algorithm]
    if bits == 4:
        return {"weights": made}
    weights = {**made, "strategy": "channel"} if "CHANNEL" in algorithm else made
    return {"weights": weights, "input_activations": {**made, "dynamic": algorithm != "FP8"}}


def _check_kv_cache(format: KVFormat) -> None:
    if str(format) != "fp8-tensor":
        raise QuantizationError(
            f"the layout of ModelOpt has fp8-tensor of keys and values, and they are {format}; use "
            "that, or the layout compressed-tensors"
        )
