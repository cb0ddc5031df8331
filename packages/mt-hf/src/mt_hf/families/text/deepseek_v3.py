"""DeepSeek-V3: latent attention, and grouped experts, balanced by a bias without a loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from mt_model import BIAS_RATE, MLAConfig, ModelConfig, MoEConfig

from mt_hf.family.experts import experts_of
from mt_hf.family.family import Family
from mt_hf.family.latent import LatentFields, latent_config, latent_fields, latent_links
from mt_hf.family.link import Link

_JUDGES = 2  # scores that say how high a group of experts is


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Fields(LatentFields):
    """The specific fields of a DeepSeek-V3's config.json, with their defaults.

    The weights of the `num_nextn_predict_layers` multi-token prediction modules are not read,
    because the forward pass of transformers does not use them.
    """

    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    num_hidden_layers: int = 61
    num_attention_heads: int = 128
    num_key_value_heads: int | None = 128
    max_position_embeddings: int = 4096
    moe_intermediate_size: int = 2048
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: int | None = 8
    first_k_dense_replace: int = 3
    n_group: int | None = 8
    topk_group: int | None = 4
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    scoring_func: Literal["sigmoid"] = "sigmoid"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    rope_interleave: bool = True
    num_nextn_predict_layers: int = 1


def _read(given: DeepseekV3Fields) -> ModelConfig:
    groups = given.n_group or 1
    moe = replace(
        given.moe,
        score="sigmoid",
        num_groups=groups,
        top_groups=given.topk_group or 1,
        group_top=_JUDGES if groups > 1 else None,
        bias_rate=BIAS_RATE,
    )
    return latent_config(given, moe, interleaved=given.rope_interleave)


def _write(config: ModelConfig) -> DeepseekV3Fields:
    moe, _ = experts_of(config)
    mixer = config.layers[0].mixer
    rope = mixer.rope if isinstance(mixer, MLAConfig) else None
    return latent_fields(
        DeepseekV3Fields,
        config,
        n_group=moe.num_groups,
        topk_group=moe.top_groups,
        rope_interleave=rope is None or rope.interleaved,
        num_nextn_predict_layers=0,
    )


def _links(config: ModelConfig) -> Iterator[Link]:
    """Also yield the biases that balance experts, which are buffers of the model."""
    yield from latent_links(config)
    for index, layer in enumerate(config.layers):
        if isinstance(layer.feed_forward, MoEConfig):
            yield Link(
                source=f"model.layers.{index}.mlp.gate.e_score_correction_bias",
                shape=(layer.feed_forward.num_experts,),
                target=f"layers.{index}.feed_forward.router.expert_bias.value",
            )


FAMILY = Family(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    model_types=("deepseek_v3", "kimi_k2"),
    fields=DeepseekV3Fields,
    read=_read,
    write=_write,
    links=_links,
    ignored=(".rotary_emb.inv_freq", "model.layers.61."),
)
