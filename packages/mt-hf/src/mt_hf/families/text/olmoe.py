"""OLMoE: norms over all queries and all keys, and experts in every layer."""

from __future__ import annotations

from dataclasses import dataclass

from mt_files import Checks
from mt_model import ModelConfig

from mt_hf.family.decoder import decoder_config
from mt_hf.family.experts import (
    RoutedFields,
    expert_fields,
    experts,
    experts_of,
    linked_experts,
    with_experts,
)
from mt_hf.family.family import Family


@dataclass(frozen=True, kw_only=True)
class OlmoeFields(RoutedFields):
    """The specific fields of an OLMoE's config.json, with their defaults."""

    vocab_size: int = 50304
    hidden_size: int = 2048
    intermediate_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    clip_qkv: float | None = None
    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    router_aux_loss_coef: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = Checks(self)
        if self.clip_qkv is not None:
            checks.add("clip_qkv", f"{self.clip_qkv} is not built; use null")
        checks.done()


def _read(given: OlmoeFields) -> ModelConfig:
    config = decoder_config(given, bias=given.attention_bias, qk_norm="whole")
    number, normalize = given.num_experts, given.norm_topk_prob
    return with_experts(config, experts(given, num_experts=number, normalize=normalize))


def _write(config: ModelConfig) -> OlmoeFields:
    moe, _ = experts_of(config)
    return expert_fields(
        OlmoeFields, config, num_experts=moe.num_experts, norm_topk_prob=moe.normalize
    )


FAMILY = Family(
    name="olmoe",
    architectures=("OlmoeForCausalLM",),
    fields=OlmoeFields,
    read=_read,
    write=_write,
    links=linked_experts(),
)
