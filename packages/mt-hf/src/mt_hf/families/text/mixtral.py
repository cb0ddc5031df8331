"""Mixtral: Mistral with experts in every layer, two for each token."""

from __future__ import annotations

from dataclasses import dataclass

from mt_files import Checks
from mt_model import ModelConfig, MoEConfig

from mt_hf.family.decoder import ACTIVATIONS, DecoderFields, decoder_config, first_mixer
from mt_hf.family.experts import (
    ExpertNames,
    expert_fields,
    experts_of,
    linked_experts,
    with_experts,
)
from mt_hf.family.family import Family

_NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


@dataclass(frozen=True, kw_only=True)
class MixtralFields(DecoderFields):
    """The specific fields of a Mixtral's config.json, with their defaults.

    The loss of `router_aux_loss_coef` always counts in training here, independent of
    `output_router_logits`, which changes no logit.
    """

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float | None = 1e6
    sliding_window: int | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    router_aux_loss_coef: float = 0.001
    router_jitter_noise: float = 0.0
    output_router_logits: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = Checks(self)
        if self.router_jitter_noise:
            text = "is not built: it is noise in what experts are given too; use 0"
            checks.add("router_jitter_noise", f"{self.router_jitter_noise} {text}")
        checks.done()


def _read(given: MixtralFields) -> ModelConfig:
    moe = MoEConfig(
        num_experts=given.num_local_experts,
        ffn_size=given.intermediate_size,
        top_k=given.num_experts_per_tok,
        activation=ACTIVATIONS[given.hidden_act],
        aux_loss=given.router_aux_loss_coef,
    )
    layers = range(given.num_hidden_layers)
    return with_experts(
        decoder_config(given, windows=[given.sliding_window for _ in layers]), moe, layers
    )


def _write(config: ModelConfig) -> MixtralFields:
    moe, _ = experts_of(config)
    rest = {"sliding_window": first_mixer(config).window, "num_local_experts": moe.num_experts}
    return expert_fields(MixtralFields, config, **rest)


FAMILY = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    model_types=("mixtral",),
    fields=MixtralFields,
    read=_read,
    write=_write,
    links=linked_experts(_NAMES),
)
