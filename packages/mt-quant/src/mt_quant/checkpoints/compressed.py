"""The layout of compressed-tensors, which transformers and vLLM read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mt_files import shorten
from torch import Tensor

from mt_quant.checkpoints.kv_layout import describe_kv_cache
from mt_quant.checkpoints.stored import (
    StoredLinear,
    by_channel,
    check_e4m3,
    check_scales,
    check_shape,
    group_of,
    integer_weight,
    needed,
)
from mt_quant.error import QuantizationError
from mt_quant.formats.format import InputFormat, WeightFormat
from mt_quant.formats.kv_format import KVFormat
from mt_quant.formats.packing import pack_words, unpack_words
from mt_quant.formats.weight import QuantizedWeight
from mt_quant.pattern import pattern_of

METHOD = "compressed-tensors"
LEAVES = (
    *("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    *("weight_global_scale", "input_scale", "input_zero_point", "input_global_scale"),
)
_MAX_PATTERNS = 1000
_LAYOUTS = {
    "fp8": "float-quantized",
    "mxfp8": "mxfp8-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
}


def describe_compressed(
    layers: Mapping[str, tuple[WeightFormat, InputFormat | None]],
    kv_cache: KVFormat | None = None,
    kept: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the `quantization_config` of config.json.

    Args:
        layers: Formats of weight and input of each quantised layer, by name.
        kv_cache: Format of all keys and values; None leaves them.
        kept: Names of the other modules with a matrix, which this layout does not list.

    Raises:
        QuantizationError: The layout does not have a format.
    """
    del kept
    groups: dict[tuple[str, str], list[str]] = {}
    schemes: dict[tuple[str, str], dict[str, Any]] = {}
    for name, (weight, input) in layers.items():
        stored = by_channel_format(weight)
        key = str(stored), str(input)
        groups.setdefault(key, []).append(name)
        schemes.setdefault(key, _scheme(stored, input))
    formats = {scheme["format"] for scheme in schemes.values()}
    return {
        "quant_method": METHOD,
        "quantization_status": "compressed",
        "format": _format_of(formats),
        "config_groups": {
            f"group_{i}": {"targets": groups[key], **schemes[key]} for i, key in enumerate(schemes)
        },
        "ignore": [],
        "kv_cache_scheme": None if kv_cache is None else describe_kv_cache(kv_cache),
    }


def _format_of(layouts: set[str]) -> str:
    if not layouts:
        return "dense"
    return next(iter(layouts)) if len(layouts) == 1 else "mixed-precision"


def by_channel_format(format: WeightFormat) -> WeightFormat:
    """Return the stored format: integers with one scale for the tensor get one for each output."""
    if not format.is_integer or format.group != "tensor":
        return format
    return WeightFormat(type=format.type, group="channel", symmetric=format.symmetric)


def _scheme(weight: WeightFormat, input: InputFormat | None) -> dict[str, Any]:
    is_other = input is not None and weight.is_integer and input.type != "int8"
    if input is not None and (input.type == "nvfp4" or is_other):
        raise QuantizationError(
            f"compressed-tensors has no layout of {weight} weights with {input} inputs here; use a "
            "recipe that leaves the input, such as int4-rtn or nvfp4-weight"
        )
    layout = _LAYOUTS.get(weight.type, "pack-quantized")
    if weight.type == "int8" and input is not None:
        layout = "int-quantized"
    return {
        "format": layout,
        "weights": _weight_arguments(weight),
        "input_activations": None if input is None else _input_arguments(input),
        "output_activations": None,
    }


def _weight_arguments(format: WeightFormat) -> dict[str, Any]:
    group = format.group
    strategy = group if isinstance(group, str) else "group"
    made = {
        "num_bits": format.bits,
        "type": "int" if format.is_integer else "float",
        "symmetric": format.symmetric,
        "strategy": "tensor_group" if format.type == "nvfp4" else strategy,
        "group_size": group if isinstance(group, int) else None,
        "dynamic": False,
    }
    scales = {"mxfp8": "torch.uint8", "mxfp4": "torch.uint8", "nvfp4": "torch.float8_e4m3fn"}
    return made | ({"scale_dtype": scales[format.type]} if format.type in scales else {})


def _input_arguments(format: InputFormat) -> dict[str, Any]:
    made = {
        "num_bits": 4 if format.type == "mxfp4" else 8,
        "type": "int" if format.type == "int8" else "float",
        "symmetric": True,
        "strategy": "group" if format.group == "block" else format.group,
        "group_size": 32 if format.group == "block" else None,
        "dynamic": format.dynamic,
    }
    return made | ({"scale_dtype": "torch.uint8"} if format.group == "block" else {})


def write_compressed(layer: StoredLinear, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a layer by the last part of their names.

    Args:
        layer: The quantised layer.
        dtype: Dtype of scales whose dtype the layout leaves open; the model's.
    """
    made = _write_integer(layer, dtype) if layer.weight.format.is_integer else _write_float(layer)
    if layer.step is not None:
        made["input_scale"] = layer.step.view(1).to(dtype)
    return made


def _write_integer(layer: StoredLinear, dtype: torch.dtype) -> dict[str, Tensor]:
    weight = by_channel(layer.weight)
    bits, zero = weight.format.bits, weight.zero
    middle = 1 << (bits - 1)
    codes = weight.codes().to(torch.int16) + (middle if zero is None else 0)
    scale = {"weight_scale": weight.scale.to(dtype)}
    if bits == 8 and layer.input is not None:
        scale["weight"] = (codes - middle).to(torch.int8)
        if zero is not None:
            scale["weight_zero_point"] = (zero.to(torch.int16) - middle).to(torch.int8)
        return scale
    scale["weight_packed"] = pack_words(codes, bits)
    scale["weight_shape"] = torch.tensor(weight.shape)
    if zero is not None:
        scale["weight_zero_point"] = pack_words(zero.t(), bits).t().contiguous()
    return scale


def _write_float(layer: StoredLinear) -> dict[str, Tensor]:
    weight = layer.weight
    kind, scale = weight.format.type, weight.scale
    name = "weight_packed" if weight.format.bits == 4 else "weight"
    data = weight.data if weight.format.bits == 4 else weight.data.view(torch.float8_e4m3fn)
    made = {name: data}
    if kind == "fp8":
        scale = scale.view(1) if weight.format.group == "tensor" else scale
    elif kind == "nvfp4" and weight.level is not None:
        scale = scale.view(torch.float8_e4m3fn)
        made["weight_global_scale"] = 1 / weight.level.view(1)
    return made | {"weight_scale": scale}


def read_compressed(
    config: Mapping[str, Any], name: str, tensors: Mapping[str, Tensor]
) -> StoredLinear:
    """Return a layer from its tensors and the `quantization_config`.

    Args:
        config: The `quantization_config`.
        name: Name of the layer.
        tensors: The layer's tensors by the last part of their names.

    Raises:
        QuantizationError: A tensor is missing or has a wrong shape, or the scheme is unknown.
    """
    scheme = _scheme_of(config, name)
    weights = _mapping(scheme.get("weights"), f"{name}: weights of its scheme")
    bits, kind = weights.get("num_bits"), weights.get("type")
    input = _input_of(scheme.get("input_activations"), name)
    if kind == "int" and bits in (4, 8):
        weight, order = _read_integer(tensors, weights, int(bits))
    elif kind == "float" and bits in (4, 8):
        weight, order = _read_float(tensors, weights), None
    else:
        raise QuantizationError(f"{name}: weights of type {kind} with {bits} bits are unknown")
    step = None
    if input is not None and not input.dynamic:
        step = needed(tensors, "input_scale")[0].float().reshape(-1)
        check_shape("input_scale", step, (1,))
    step = None if step is None else step.view(1, 1)
    return StoredLinear(weight=weight, input=input, step=step, order=order)


def _scheme_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the first scheme whose targets have the name; else a pattern of it; else `Linear`."""
    groups = _mapping(config.get("config_groups"), "config_groups of quantization_config")
    schemes = [_mapping(scheme, "a group of config_groups") for scheme in groups.values()]
    targets = [_targets(scheme) for scheme in schemes]
    for scheme, named in zip(schemes, targets, strict=True):
        if name in named:
            return scheme
    # Patterns are counted, as each is tried with each layer.
    patterns = [[each for each in named if each.startswith("re:")] for named in targets]
    if sum(map(len, patterns)) > _MAX_PATTERNS:
        raise QuantizationError(
            f"quantization_config has more than {_MAX_PATTERNS} patterns as targets; name the "
            "layers themselves"
        )
    for scheme, named in zip(schemes, patterns, strict=True):
        if any(pattern_of(each[3:]).matches(name, whole=False) for each in named):
            return scheme
    for scheme, named in zip(schemes, targets, strict=True):
        if "Linear" in named:
            return scheme
    raise QuantizationError(
        f"{name} has codes, but no group of quantization_config names it; restore config.json"
    )


def _targets(scheme: Mapping[str, Any]) -> Sequence[str]:
    found = scheme.get("targets") or []
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise QuantizationError(f"targets is {shorten(found)}, and a list of names is needed")
    return found


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise QuantizationError(f"{what} is {shorten(value)}, and a mapping is needed")
    return value


def _input_of(given: object, name: str) -> InputFormat | None:
    if given is None:
        return None
    found = _mapping(given, f"{name}: input_activations of its scheme")
    bits, kind, strategy = (found.get(key) for key in ("num_bits", "type", "strategy"))
    if (bits, kind) == (8, "float") and found.get("group_size") == 32:
        return InputFormat(type="mxfp8", group="block")
    if (bits, kind) == (4, "float") and found.get("group_size") == 32:
        return InputFormat(type="mxfp4", group="block")
    if bits != 8 or strategy not in ("token", "tensor") or found.get("symmetric") is False:
        return None  # left as it is: more exact than the scheme
    type = "int8" if kind == "int" else "fp8"
    if strategy == "token":
        return InputFormat(type=type, group="token")
    return InputFormat(type=type, group="tensor", dynamic=bool(found.get("dynamic")))


def _read_integer(
    tensors: Mapping[str, Tensor], weights: Mapping[str, Any], bits: int
) -> tuple[QuantizedWeight, Tensor | None]:
    scale, zero = needed(tensors, "weight_scale")[0], None
    middle = 1 << (bits - 1)
    if "weight" in tensors:
        codes = (tensors["weight"].to(torch.int16) + middle).to(torch.uint8)
    else:
        words, sizes = needed(tensors, "weight_packed", "weight_shape")
        check_shape("weight_shape", sizes, (2,))
        rows, columns = (int(size) for size in sizes)
        check_shape("weight_packed", words, (rows, -(-columns * bits // 32)))
        codes = unpack_words(words, bits, columns)
    scale = _scale_of(scale, weights, (len(codes), codes.shape[1]))
    check_scales("weight_scale", scale, may_be_zero=False)
    scale = scale.expand(len(codes), -1)
    if weights.get("symmetric") is False:
        zero = needed(tensors, "weight_zero_point")[0]
        if zero.dtype == torch.int32:
            zero = unpack_words(zero.t().contiguous(), bits, len(codes)).t().contiguous()
        else:
            zero = (zero.to(torch.int16) + middle).view(-1, scale.shape[1]).expand_as(scale)
        check_shape("weight_zero_point", zero, tuple(scale.shape))
    return by_groups(codes, scale, zero, bits, tensors.get("weight_g_idx"))


def by_groups(
    codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: Tensor | None
) -> tuple[QuantizedWeight, Tensor | None]:
    """Return a weight with its columns sorted by group, and each column's index in the layer.

    Args:
        codes: Unsigned codes, uint8 [out, in].
        scale: Scales, [out, groups].
        zero: Zero points, [out, groups]; None for the middle.
        bits: Number of bits of a code.
        group: Group of each column, [in]; None or negative for columns in order.

    Raises:
        QuantizationError: The groups have different sizes, or are out of range.
    """
    if group is None or scale.shape[1] == 1 or bool((group < 0).all()):
        return integer_weight(codes, scale, zero, bits), None
    check_shape("g_idx", group, (codes.shape[1],))
    count = scale.shape[1]
    sorted_group, order = torch.sort(group.long(), stable=True)
    expected = torch.arange(count).repeat_interleave(codes.shape[1] // count)
    if not torch.equal(sorted_group, expected):
        raise QuantizationError(
            f"g_idx does not divide {codes.shape[1]} inputs into {count} groups of equal size; "
            "restore the file"
        )
    # An order by group that is the layer's own needs no index.
    is_sorted = torch.equal(group.long(), expected)
    return integer_weight(codes[:, order], scale, zero, bits), None if is_sorted else order


def _scale_of(scale: Tensor, weights: Mapping[str, Any], shape: tuple[int, int]) -> Tensor:
    """Return a layer's scales as a matrix, checked against the strategy of its scheme."""
    rows, columns = shape
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy is None:  # older files leave it out
        strategy = {None: "tensor", -1: "channel"}.get(size, "group")
    if strategy in ("group", "tensor_group") and (
        type(size) is not int or size < 2 or columns % size
    ):
        raise QuantizationError(
            f"group_size of its scheme is {shorten(size)}, which does not divide {columns} inputs "
            "into groups of 2 or more; restore config.json"
        )
    expected = {"tensor": (1, 1), "channel": (rows, 1)}
    if strategy not in expected and type(size) is int:
        expected |= dict.fromkeys(("group", "tensor_group"), (rows, columns // size))
    if strategy not in expected:
        raise QuantizationError(
            f"strategy of its scheme is {shorten(strategy)}; use tensor, channel or group"
        )
    found = scale.reshape(-1, 1) if scale.dim() < 2 else scale
    if tuple(found.shape) != expected[strategy]:
        raise QuantizationError(
            f"weight_scale has the shape {list(scale.shape)}, and strategy {strategy!r} of its "
            f"scheme needs {list(expected[strategy])}; restore the file or config.json"
        )
    return found


def _read_float(tensors: Mapping[str, Tensor], weights: Mapping[str, Any]) -> QuantizedWeight:
    strategy, scale = weights.get("strategy"), needed(tensors, "weight_scale")[0]
    if weights.get("num_bits") == 4:
        data = needed(tensors, "weight_packed")[0]
        _scale_of(scale, weights, (data.shape[0], 2 * data.shape[1]))
        return _read_fp4(data, scale, tensors)
    data = needed(tensors, "weight")[0]
    check_e4m3("weight", data)
    if strategy != "block":
        scale = _scale_of(scale, weights, (data.shape[0], data.shape[1]))
    if scale.dtype == torch.uint8:
        check_shape("weight_scale", scale, (data.shape[0], data.shape[1] // 32))
        return float_weight(data, scale, WeightFormat(type="mxfp8", group=32))
    if strategy == "block":
        block = weights.get("block_structure")
        if not isinstance(block, Sequence) or len(block) != 2:
            raise QuantizationError(f"block_structure is {shorten(block)}, and two are needed")
        return block_weight(data, scale, (int(block[0]), int(block[1])))
    return scaled_weight(data, scale)


def scaled_weight(data: Tensor, scale: Tensor) -> QuantizedWeight:
    """Return an fp8 weight with scales for the tensor, its outputs or groups of its inputs.

    Raises:
        QuantizationError: The number of scales is wrong.
    """
    check_scales("weight_scale", scale)
    if scale.numel() == 1:
        format = WeightFormat(type="fp8", group="tensor")
        return float_weight(data, scale.float().view(1, 1), format)
    scale = scale.view(-1, 1) if scale.dim() == 1 else scale
    check_shape("weight_scale", scale, (data.shape[0], scale.shape[1]))
    format = WeightFormat(type="fp8", group=group_of(scale, data.shape[1]))
    return float_weight(data, scale.float(), format)


def block_weight(data: Tensor, scale: Tensor, block: tuple[int, int]) -> QuantizedWeight:
    """Return an fp8 weight with a scale for each block of outputs and inputs, without loss.

    Raises:
        QuantizationError: The number of scales is wrong.
    """
    rows, columns = data.shape
    check_shape("the scale", scale, (-(-rows // block[0]), -(-columns // block[1])))
    check_scales("the scale", scale)
    size = math.gcd(block[1], columns)  # so that a partial last block is whole groups too
    wide = scale.float().repeat_interleave(block[0], 0)[:rows]
    wide = wide.repeat_interleave(block[1] // size, 1)[:, : columns // size]
    format = WeightFormat(type="fp8", group=size if size < columns else "channel")
    return float_weight(data, wide.contiguous(), format)


def float_weight(
    data: Tensor, scale: Tensor, format: WeightFormat, level: Tensor | None = None
) -> QuantizedWeight:
    """Return a float weight from codes of 8 bits, or from bytes of two codes."""
    raw = data.contiguous().view(torch.uint8)
    columns = raw.shape[1] * 8 // format.bits
    return QuantizedWeight(
        data=raw, scale=scale.contiguous(), zero=None, format=format, columns=columns, level=level
    )


def _read_fp4(data: Tensor, scale: Tensor, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
    columns = 2 * data.shape[1]
    if scale.dtype == torch.uint8:
        check_shape("weight_scale", scale, (data.shape[0], columns // 32))
        return float_weight(data, scale, WeightFormat(type="mxfp4", group=32))
    level = needed(tensors, "weight_global_scale")[0].float().reshape(-1)
    check_shape("weight_global_scale", level, (1,))
    return nvfp4_weight(data, scale, 1 / level.view(1, 1))


def nvfp4_weight(data: Tensor, scale: Tensor, level: Tensor) -> QuantizedWeight:
    """Return an nvfp4 weight: bytes of two codes, e4m3 scales of 16 inputs, and their factor.

    Raises:
        QuantizationError: The number of scales is wrong, or they are not e4m3.
    """
    check_shape("weight_scale", scale, (data.shape[0], 2 * data.shape[1] // 16))
    check_e4m3("weight_scale", scale)
    check_scales("weight_scale", scale.float())
    check_scales("the scale of all groups", level, may_be_zero=False)
    format = WeightFormat(type="nvfp4", group=16)
    return float_weight(data, scale.view(torch.uint8), format, level)
