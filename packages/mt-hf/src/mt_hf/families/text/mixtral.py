"""Mixtral: Mistral with experts in every layer, two for each token."""

from __future__ import annotations

from dataclasses import dataclass

from mt_files import Checks
from mt_model import ModelConfig

from mt_hf.family.decoder import decoder_config
from mt_hf.family.experts import (
    ExpertNames,
    RoutedFields,
    expert_fields,
    experts,
    experts_of,
    linked_experts,
    with_experts,
)
from mt_hf.family.family import Family

_NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


@dataclass(frozen=True, kw_only=True)
class MixtralFields(RoutedFields):
    """The specific fields of a Mixtral's config.json, with their defaults."""

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float | None = 1e6
    sliding_window: int | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    router_jitter_noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = Checks(self)
        if self.router_jitter_noise:
            text = "is not built: it is noise in what experts are given too; use 0"
            checks.add("router_jitter_noise", f"{self.router_jitter_noise} {text}")
        checks.done()


def _read(given: MixtralFields) -> ModelConfig:
    config = decoder_config(given, windows=[given.sliding_window] * given.num_hidden_layers)
    return with_experts(config, experts(given, num_experts=given.num_local_experts))


def _write(config: ModelConfig) -> MixtralFields:
    moe, _ = experts_of(config)
    return expert_fields(MixtralFields, config, num_local_experts=moe.num_experts)


FAMILY = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    fields=MixtralFields,
    read=_read,
    write=_write,
    links=linked_experts(_NAMES),
)
