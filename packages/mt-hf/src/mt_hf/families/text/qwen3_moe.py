"""Qwen3-MoE: Qwen3 with experts in the layers listed in config.json."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mt_model import ModelConfig

from mt_hf.family.decoder import decoder_config, first_mixer
from mt_hf.family.experts import (
    SparseFields,
    expert_fields,
    linked_experts,
    sparse_fields,
    with_experts,
)
from mt_hf.family.family import Family


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeFields(SparseFields):
    """The specific fields of a Qwen3-MoE's config.json, with their defaults.

    If there is a window, all layers have it. `num_local_experts` is a newer name of `num_experts`.
    Nothing reads `max_window_layers`.
    """

    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_key_value_heads: int | None = 4
    attention_bias: bool = False
    max_window_layers: int | None = None
    num_local_experts: int | None = None


def _read(given: Qwen3MoeFields) -> ModelConfig:
    window = given.sliding_window if given.use_sliding_window else None
    windows = [window] * given.num_hidden_layers
    config = decoder_config(given, windows=windows, bias=given.attention_bias, qk_norm="head")
    number = given.num_local_experts or given.num_experts
    return with_experts(config, replace(given.moe, num_experts=number), given.sparse)


def _write(config: ModelConfig) -> Qwen3MoeFields:
    mixer, found = first_mixer(config), sparse_fields(config)
    return expert_fields(
        Qwen3MoeFields,
        config,
        use_sliding_window=mixer.window is not None,
        num_local_experts=found["num_experts"],
        **found,
    )


FAMILY = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    fields=Qwen3MoeFields,
    read=_read,
    write=_write,
    links=linked_experts(),
)
