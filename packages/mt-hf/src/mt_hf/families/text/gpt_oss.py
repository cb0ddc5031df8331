"""GPT-OSS: attention sinks, windows in every other layer, experts with biases and clipped gates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from mt_files import Checks
from mt_model import AttentionConfig, ModelConfig, MoEConfig

from mt_hf.families.text.qwen2 import LayerType, window_fields
from mt_hf.family.decoder import (
    DecoderFields,
    attention_links,
    decoder_config,
    decoder_links,
    first_mixer,
)
from mt_hf.family.experts import expert_fields, experts_of, with_experts
from mt_hf.family.family import Family
from mt_hf.family.link import Link, leaves

_ALPHA = 1.702


@dataclass(frozen=True, kw_only=True)
class GptOssFields(DecoderFields):
    """The specific fields of a GPT-OSS's config.json, with their defaults.

    `layer_types` lists the layers with a window; without it, every other layer has one, from
    the first. Experts stored in MXFP4, as in the published folders, are read as their values:
    the model's weights are in bf16 or wider, and are saved in that dtype. Nothing reads
    `hidden_act`. The loss of `router_aux_loss_coef` always counts in training here, independent
    of `output_router_logits`, which changes no logit.
    """

    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 8
    head_dim: int | None = 64
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float | None = 150000.0
    sliding_window: int = 128
    layer_types: tuple[LayerType, ...] | None = None
    attention_bias: bool = True
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    swiglu_alpha: float = _ALPHA
    swiglu_limit: float = 7.0
    router_aux_loss_coef: float = 0.001
    output_router_logits: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = Checks(self)
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            text = f"{len(self.layer_types)} of them for {self.num_hidden_layers} layers"
            checks.add("layer_types", text)
        if self.swiglu_alpha != _ALPHA:
            checks.add("swiglu_alpha", f"{self.swiglu_alpha} is not built; use {_ALPHA}")
        checks.done()

    @property
    def windows(self) -> list[int | None]:
        """The window of each layer."""
        turns = ("sliding_attention", "full_attention")
        count = self.num_hidden_layers
        types = self.layer_types or [turns[index % 2] for index in range(count)]
        return [self.sliding_window if kind == turns[0] else None for kind in types]

    @property
    def described_rope(self) -> Mapping[str, Any] | None:
        """The rotary embedding; the published one by default."""
        return self.rope_scaling or self.rope_parameters or _ROPE


_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read(given: GptOssFields) -> ModelConfig:
    given = replace(given, rope_parameters=given.described_rope, rope_scaling=None)
    bias = given.attention_bias
    config = decoder_config(given, windows=given.windows, qkv_bias=bias, out_bias=bias)
    moe = MoEConfig(
        num_experts=given.num_local_experts,
        ffn_size=given.intermediate_size,
        top_k=given.num_experts_per_tok,
        activation="gelu_quick",
        bias=True,
        clamp=given.swiglu_limit,
        up_offset=1.0,
        score="softmax_of_chosen",
        router_bias=True,
        aux_loss=given.router_aux_loss_coef,
    )
    layers = tuple(
        replace(layer, mixer=replace(cast("AttentionConfig", layer.mixer), sinks="learned"))
        for layer in config.layers
    )
    norm = replace(config.norm, rounds_first=False)
    config = replace(config, layers=layers, norm=norm)
    return with_experts(config, moe, range(given.num_hidden_layers))


def _write(config: ModelConfig) -> GptOssFields:
    moe, _ = experts_of(config)
    windows = window_fields(config)
    found = expert_fields(
        GptOssFields,
        config,
        attention_bias=first_mixer(config).out_bias,
        layer_types=windows["layer_types"],
        sliding_window=windows["sliding_window"] or GptOssFields.sliding_window,
        num_local_experts=moe.num_experts,
        swiglu_limit=moe.clamp or GptOssFields.swiglu_limit,
    )
    plain = None if found.rope_scaling else {"rope_type": "default", "rope_theta": found.rope_theta}
    return replace(found, hidden_act="silu", rope_parameters=plain)


def _attention_links(
    source: str, target: str, mixer: AttentionConfig, hidden: int
) -> Iterator[Link]:
    yield from attention_links(source, target, mixer, hidden)
    yield Link(source=f"{source}.sinks", shape=(mixer.num_heads,), target=f"{target}.sinks")


def _expert_links(source: str, target: str, moe: MoEConfig, hidden: int) -> Iterator[Link]:
    """Yield the arrays of all experts, whose rows are inputs; gate and up alternate."""
    number, ffn = moe.num_experts, moe.width
    yield from leaves(f"{source}.router", f"{target}.router", number, hidden)
    for name, leaf, shape, order in (
        ("gate_up_proj", "up.weight", (number, hidden, 2 * ffn), (0, 3, 2, 1)),
        ("gate_up_proj_bias", "up.bias", (number, 2 * ffn), (0, 2, 1)),
        ("down_proj", "down.weight", (number, ffn, hidden), (0, 2, 1)),
        ("down_proj_bias", "down.bias", (number, hidden), None),
    ):
        yield Link(
            source=f"{source}.experts.{name}",
            shape=shape,
            target=f"{target}.experts.{leaf}",
            order=order,
        )


FAMILY = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    model_types=("gpt_oss",),
    fields=GptOssFields,
    read=_read,
    write=_write,
    links=partial(decoder_links, attention=_attention_links, mlp=_expert_links),
)
