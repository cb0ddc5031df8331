"""The frozen base of a run of adapters, whose weights are codes in a format of mt-quant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from mt_ckpt import RunFolder, TensorShard, param_shards
from mt_model import (
    GPT,
    ModelConfig,
    WeightCodes,
    block_linears,
    grouped_layers,
    matrix_shape,
    weight_codes,
)
from mt_moe import GroupedLinear
from mt_parallel_state import ParallelLayout, ParallelState, shard_param
from mt_quant import QuantizationError, WeightFormat
from mt_tensor_parallel import RowParallelLinear
from torch import nn

from mt_train.config.loading import LoadedConfig


def codes_of(stages: Iterable[GPT]) -> Mapping[str, WeightCodes]:
    """Return the codes of a rank's stages by the names of the replaced weights."""
    return {f"{n}.weight": codes for stage in stages for n, codes in weight_codes(stage).items()}


def is_code(name: str, codes: Mapping[str, WeightCodes]) -> bool:
    """Return whether a parameter holds the codes of a weight, or their scales."""
    owner, _, _ = name.partition(".codes.")
    return name in codes or (owner != name and f"{owner}.weight" in codes)


def fill_codes(
    codes: Mapping[str, WeightCodes], state: ParallelState, read: Callable[[TensorShard], None]
) -> None:
    """Round the weights of a base to their format, with memory for one weight in fp32.

    All ranks call it; it gathers weights where ranks split numbers that share a scale.

    Args:
        codes: Codes by the names of their weights.
        state: This rank's place.
        read: Function that fills the tensor of a weight's shard.
    """
    for name, own in codes.items():
        part = cast("nn.Parameter", torch.empty(own.full_shape, dtype=torch.float32))
        shard_param(part, own.record.spec, is_copy=own.record.is_copy)
        how: dict[str, Any] = {"prefix": RunFolder.WEIGHTS, "params": {name: part}}
        for shard in param_shards([(name, part)], state.layout, state.rank, **how):
            read(shard)
        own.store(part.to(own.scale.device))


def check_base_format(loaded: LoadedConfig, model: ModelConfig) -> None:
    """Check that a format is known, and fits each rank's part of every linear layer.

    Every rank finds the same, whatever part of the model it has.

    Raises:
        ConfigError: The format is unknown, or does not fit.
    """
    lora, parallel = loaded.config.lora, loaded.config.parallel
    if lora is None or lora.base_format is None:
        return
    try:
        format = WeightFormat.named(lora.base_format)
    except QuantizationError as error:
        raise loaded.error("lora.base_format", str(error)) from error
    size = max(format.group if isinstance(format.group, int) else 1, 8 // format.bits)
    plain = model.build(ParallelState(ParallelLayout()), device="meta", seed=None)
    etp = parallel.etp or (parallel.tp if parallel.ep == 1 else 1)
    for name, layer in {**block_linears(plain), **grouped_layers(plain)}.items():
        run = matrix_shape(layer).columns
        if isinstance(layer, RowParallelLinear) and parallel.tp > 1:
            run = layer.run // parallel.tp
        elif isinstance(layer, GroupedLinear) and layer.split == "in":
            run //= etp
        if run % size:
            text = f"{format} has {size} inputs in a group, and {name} has {run} in a row on each "
            text += f"rank; use a format with groups that divide {run}, or int8"
            raise loaded.error("lora.base_format", text)
