"""Scales of the keys and values that a model keeps in generation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from mt_quant import Decision, KVCalibrator, KVFormat, KVScales, KVScheme, QuantizationError
from torch import Tensor

from mt_model.block.entry import MixerConfig
from mt_model.language.decoder import GPT
from mt_model.stack.cache_allocation import check_keeps, own_heads


def kv_formats(model: GPT, decisions: Mapping[str, Decision]) -> dict[int, KVFormat]:
    """Return the formats that rules give the keys and values of a stage's layers, by index.

    Args:
        model: Stage of a model.
        decisions: Decisions for the whole model by the names of modules; modules without keys and
            values are ignored.

    Raises:
        QuantizationError: There are formats, and none is for a layer that keeps keys and values.
    """
    given = {name: d.kv_cache for name, d in decisions.items() if d.kv_cache is not None}
    keeping = [
        f"layers.{index}.mixer"
        for index, mixer in model.config.mixers.items()
        if mixer.token_cache and index >= model.config.encoder_layers
    ]
    if given and not set(given) & set(keeping):
        name, format = next(iter(given.items()))
        check_keeps(model.config.mixers.values(), format)
        raise QuantizationError(
            f"kv_cache: {format} is for {name or 'the model'}, which keeps no keys and values; "
            f"name what does, such as {keeping[0]}"
        )
    names = {index: f"layers.{index}.mixer" for index in _keeping(model)}
    return {index: given[name] for index, name in names.items() if name in given}


@torch.no_grad()
def calibrate_kv_cache(
    model: GPT,
    batches: Iterable[Tensor | Mapping[str, Any]],
    format: KVFormat | str | Mapping[int, KVFormat],
) -> dict[int, KVScheme]:
    """Return schemes for a model's keys and values, with scales measured on batches.

    Every rank of a tensor-parallel group calls it with the same batches; scales are all-reduced
    (MAX) over the group. Give the result to the model: `model.kv_schemes = ...`. A format without
    static scales reads no batch.

    Args:
        model: Whole model in evaluation mode.
        batches: Tokens, [B, S], of equal length in a batch; or mappings of the model's arguments.
        format: Format of all layers, or formats of some layers by index.

    Raises:
        QuantizationError: There is no such format, or no layer keeps keys and values.
        CalibrationError: There is no batch, or a value is not finite.
    """
    mixers = _keeping(model)
    if isinstance(format, str | KVFormat):
        one = KVFormat.named(format) if isinstance(format, str) else format
        check_keeps(model.config.mixers.values(), one)
        format = dict.fromkeys(mixers, one)
    static = {index: each for index, each in format.items() if each.is_static}
    calibrator = KVCalibrator()
    for batch in batches if static else ():
        given = {"tokens": batch} if isinstance(batch, Tensor) else batch
        for index, key, value in _kept(model, given, {i: mixers[i] for i in static}):
            calibrator.update(str(index), key, value)
    schemes = {i: KVScheme(format=each) for i, each in format.items() if i not in static}
    for each in dict.fromkeys(static.values()):  # in the same order on every rank
        found = calibrator.scales(each, group=model.shard.group)
        for index in (i for i, used in static.items() if used == each):
            scales = found[str(index)]
            key, value = (_whole(x, index, model) for x in (scales.key, scales.value))
            schemes[index] = KVScheme(format=each, scales=KVScales(key=key, value=value))
    return schemes


def _keeping(model: GPT) -> dict[int, MixerConfig]:
    return {index: mixer for index, mixer in model.generating().items() if mixer.token_cache}


def _kept(
    model: GPT, batch: Mapping[str, Any], mixers: Mapping[int, MixerConfig]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the keys and values that layers keep of a batch, [B, S, heads, D]."""
    tokens = batch["tokens"].to(model.shard.device)
    rows, length = tokens.shape
    cache = model.new_cache(batch_size=rows, max_length=length, kv_cache_dtype="full")
    model(None, {**batch, "tokens": tokens, "cache": cache})
    dtype = model.shard.dtype
    for index, mixer in mixers.items():
        kept = {name: cache.read(index, name, dtype) for name in mixer.token_cache}
        by_kind = {
            kind: [x for name, x in kept.items() if mixer.token_cache[name] == kind]
            for kind in ("key", "value")
        }
        key = torch.cat(by_kind["key"], -1)
        yield index, key, torch.cat(by_kind["value"], -1) if by_kind["value"] else key


def _whole(scale: Tensor, layer: int, model: GPT) -> Tensor:
    """Gather the scales of all ranks' heads from this rank's scales."""
    shard, mixer = model.shard, model.generating()[layer]
    whole = torch.zeros(mixer.token_heads, device=scale.device)
    own_heads(whole, layer, mixer, shard).copy_(scale)
    if shard.group is not None:
        dist.all_reduce(whole, dist.ReduceOp.MAX, group=shard.group)
    return whole
