"""Scales of keys and values in checkpoints: `kv_cache_scheme`, `k_scale`, `v_scale`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from mt_files import shorten
from torch import Tensor

from mt_quant.calibration.kv_cache import KVScales, KVScheme
from mt_quant.checkpoints.stored import needed
from mt_quant.error import QuantizationError
from mt_quant.formats.kv_format import KVFormat

KV_LEAVES = ("k_scale", "v_scale")
"""Last parts of the names of an attention module's scales."""
_STRATEGIES = {"tensor": "tensor", "head": "attn_head"}


def describe_kv_cache(format: KVFormat) -> dict[str, Any]:
    """Return the `kv_cache_scheme` of a `quantization_config`.

    Raises:
        QuantizationError: The format has no static scales, the only ones that checkpoints store.
    """
    if not format.is_static:
        raise QuantizationError(
            f"a checkpoint stores static scales of keys and values, and {format} has none; use "
            f"{format.type}-head or {format.type}-tensor, or choose {format.type} at run time"
        )
    return {
        "num_bits": 8,
        "type": "int" if format.type == "int8" else "float",
        "symmetric": True,
        "strategy": _STRATEGIES[format.group],
        "group_size": None,
        "dynamic": False,
    }


def kv_format_of(config: Mapping[str, Any]) -> KVFormat | None:
    """Return the format of keys and values in a `quantization_config`, if it names one.

    The format is its `kv_cache_scheme`, or FP8 for ModelOpt's `kv_cache_quant_algo: FP8`. Other
    algorithms of ModelOpt are ignored, because full keys and values are more exact.

    Raises:
        QuantizationError: The scheme is not supported.
    """
    scheme = config.get("kv_cache_scheme")
    if scheme is None:
        inner = config.get("quantization", config)
        algorithm = inner.get("kv_cache_quant_algo") if isinstance(inner, Mapping) else None
        return KVFormat.named("fp8-tensor") if algorithm == "FP8" else None
    found: Mapping[str, Any] = scheme if isinstance(scheme, Mapping) else {}
    types = {"int": "int8", "float": "fp8"}
    groups = {strategy: group for group, strategy in _STRATEGIES.items()}
    type = types.get(str(found.get("type")))
    group = groups.get(str(found.get("strategy") or "tensor"))
    is_plain = not found.get("dynamic") and found.get("symmetric") is not False
    if type is None or group is None or found.get("num_bits") != 8 or not is_plain:
        raise QuantizationError(
            f"kv_cache_scheme {shorten(scheme)} is not supported; int and float of 8 bits are, "
            "symmetric, not dynamic, with the strategy tensor or attn_head; remove it from "
            "config.json to keep full keys and values"
        )
    return KVFormat.named(f"{type}-{group}")


def common_kv_format(schemes: Mapping[str, KVScheme]) -> KVFormat | None:
    """Return the common format of all attention modules; None without any module.

    Raises:
        QuantizationError: The modules have several formats, and a checkpoint stores one.
    """
    formats = {scheme.format: name for name, scheme in schemes.items()}
    if len(formats) > 1:
        listed = " and ".join(f"{format} ({name})" for format, name in list(formats.items())[:2])
        raise QuantizationError(
            f"a checkpoint has one format for keys and values, and there are {listed}; give all "
            "attention the same rule"
        )
    return next(iter(formats), None)


def write_kv_scales(scheme: KVScheme) -> dict[str, Tensor]:
    """Return the scales of an attention module by the last part of their names.

    Raises:
        QuantizationError: The format has no static scales.
    """
    describe_kv_cache(scheme.format)
    scales = scheme.scales
    parts = () if scales is None else (scales.key, scales.value)
    if scheme.format.group == "tensor":
        return {n: x.amax().view(1).cpu() for n, x in zip(KV_LEAVES, parts, strict=True)}
    return {n: x.view(-1, 1, 1).cpu() for n, x in zip(KV_LEAVES, parts, strict=True)}


def read_kv_scales(tensors: Mapping[str, Tensor], format: KVFormat, heads: int) -> KVScheme:
    """Return the scales of an attention module.

    Args:
        tensors: The scales by the last part of their names.
        format: The result of `kv_format_of`.
        heads: Number of key and value heads; a single head takes the largest scale.

    Raises:
        QuantizationError: A scale is missing, not above 0, or their number is wrong.
    """
    made: list[Tensor] = []
    for name, given in zip(KV_LEAVES, needed(tensors, *KV_LEAVES), strict=True):
        scale = given.to(torch.float32).flatten()
        if not bool((scale.isfinite() & (scale > 0)).all()) or not scale.numel():
            raise QuantizationError(f"{name} is {shorten(scale.tolist())}; scales are above 0")
        scale = scale.amax().view(1) if heads == 1 or format.group == "tensor" else scale
        if len(scale) not in (1, heads):
            raise QuantizationError(f"{name} has {len(scale)} scales, and {heads} heads need them")
        made.append(scale.expand(heads).contiguous())
    return KVScheme(format=format, scales=KVScales(key=made[0], value=made[1]))
