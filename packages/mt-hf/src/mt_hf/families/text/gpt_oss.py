"""GPT-OSS: attention sinks, windows in every other layer, experts with biases and clipped gates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mt_files import Checks
from mt_model import AttentionConfig, ModelConfig, MoEConfig

from mt_hf.family.decoder import attention_links, decoder_config, decoder_links
from mt_hf.family.experts import RoutedFields, expert_fields, experts, experts_of, with_experts
from mt_hf.family.family import Family
from mt_hf.family.link import Link, leaves
from mt_hf.family.windows import WindowFields, window_fields

_ALPHA = 1.702


@dataclass(frozen=True, kw_only=True)
class GptOssFields(RoutedFields, WindowFields):
    """The specific fields of a GPT-OSS's config.json, with their defaults.

    `layer_types` lists the layers with a window; without it, every other layer has one, from
    the first. Experts stored in MXFP4, as in the published folders, are read as their values:
    the model's weights are in bf16 or wider, and are saved in that dtype. Nothing reads
    `hidden_act`.
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
    attention_bias: bool = True
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    swiglu_alpha: float = _ALPHA
    swiglu_limit: float = 7.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = Checks(self)
        if self.swiglu_alpha != _ALPHA:
            checks.add("swiglu_alpha", f"{self.swiglu_alpha} is not built; use {_ALPHA}")
        checks.done()

    def slides(self, layer: int) -> bool:
        """Return whether a layer has a window if `layer_types` is missing."""
        return layer % 2 == 0

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
    config = decoder_config(
        given, windows=given.windows, bias=given.attention_bias, sinks="learned"
    )
    moe = experts(
        given,
        num_experts=given.num_local_experts,
        activation="gelu_quick",
        bias=True,
        clamp=given.swiglu_limit,
        up_offset=1.0,
        score="softmax_of_chosen",
        router_bias=True,
    )
    norm = replace(config.norm, rounds_first=False)
    return with_experts(replace(config, norm=norm), moe)


def _write(config: ModelConfig) -> GptOssFields:
    moe, _ = experts_of(config)
    windows = window_fields(config)
    found = expert_fields(
        GptOssFields,
        config,
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
    fields=GptOssFields,
    read=_read,
    write=_write,
    links=partial(decoder_links, attention=_attention_links, mlp=_expert_links),
)
