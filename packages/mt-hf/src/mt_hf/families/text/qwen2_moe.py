"""Qwen2-MoE: Qwen2 with experts, and a gated shared expert."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mt_files import Checks
from mt_model import ModelConfig

from mt_hf.families.text.qwen2 import qwen_windows
from mt_hf.family.decoder import decoder_config, first_mixer
from mt_hf.family.experts import (
    SparseFields,
    expert_fields,
    experts_of,
    linked_experts,
    sparse_fields,
    with_experts,
)
from mt_hf.family.family import Family
from mt_hf.family.windows import WindowFields


@dataclass(frozen=True, kw_only=True)
class Qwen2MoeFields(SparseFields, WindowFields):
    """The specific fields of a Qwen2-MoE's config.json, with their defaults.

    `layer_types` lists the layers with a window; without it, every other layer below
    `max_window_layers` has one.
    """

    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16
    moe_intermediate_size: int = 1408
    shared_expert_intermediate_size: int = 5632
    num_experts: int = 60
    num_experts_per_tok: int = 4
    qkv_bias: bool = True
    max_window_layers: int = 28

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = Checks(self)
        checks.at_least(1, "shared_expert_intermediate_size")
        checks.done()

    @property
    def window(self) -> int | None:
        """Window size of a layer with a window."""
        return self.sliding_window if self.use_sliding_window else None

    def slides(self, layer: int) -> bool:
        """Return whether a layer has a window if `layer_types` is missing."""
        return layer % 2 == 0 and layer < self.max_window_layers


def _read(given: Qwen2MoeFields) -> ModelConfig:
    config = decoder_config(given, windows=given.windows, qkv_bias=given.qkv_bias)
    shared = given.shared_expert_intermediate_size
    moe = replace(given.moe, shared_size=shared, shared_gate=True)
    return with_experts(config, moe, given.sparse)


def _write(config: ModelConfig) -> Qwen2MoeFields:
    moe, _ = experts_of(config)
    rest: dict[str, Any] = {
        "qkv_bias": first_mixer(config).qkv_bias,
        "shared_expert_intermediate_size": moe.shared_size,
        **qwen_windows(config),
        **sparse_fields(config),
    }
    return expert_fields(Qwen2MoeFields, config, **rest)


FAMILY = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    fields=Qwen2MoeFields,
    read=_read,
    write=_write,
    links=linked_experts(),
)
