"""Gemma 2: norms before and after each branch, soft caps, and a window in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from mt_files import Checks
from mt_model import ModelConfig, NormConfig, QKNorm

from mt_hf.family.decoder import (
    ACTIVATION_NAMES,
    check_activation,
    decoder_config,
    decoder_fields,
    decoder_links,
    first_layer,
)
from mt_hf.family.family import Family
from mt_hf.family.windows import WindowFields, window_fields

_NORMS: Mapping[str, str] = MappingProxyType(
    {
        "input_layernorm": "mixer_norm",
        "post_attention_layernorm": "mixer_output_norm",
        "pre_feedforward_layernorm": "feed_forward_norm",
        "post_feedforward_layernorm": "feed_forward_output_norm",
    }
)

gemma_links = partial(decoder_links, norms=_NORMS)


@dataclass(frozen=True, kw_only=True)
class GemmaFields(WindowFields):
    """The specific fields of the config.json of a Gemma from 2 on, with their defaults.

    `layer_types` lists the layers with a window; without it, all layers except each
    `every_whole`-th have one. As in transformers, nothing reads `hidden_act`.
    """

    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    hidden_act: str = "gelu_pytorch_tanh"
    hidden_activation: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_pre_attn_scalar: int = 256
    final_logit_softcapping: float | None = None
    attn_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = Checks(self)
        checks.at_least(1, "sliding_window")
        checks.above(0, "query_pre_attn_scalar", "final_logit_softcapping")
        checks.above(0, "attn_logit_softcapping")
        check_activation(checks, "hidden_activation", self.hidden_activation)
        if self.use_bidirectional_attention:
            checks.add("use_bidirectional_attention", "true: it is causal here; use false")
        checks.done()

    @property
    def every_whole(self) -> int:
        """Distance between layers without a window."""
        return 2

    def slides(self, layer: int) -> bool:
        """Return whether a layer has a window if `layer_types` is missing."""
        return bool((layer + 1) % self.every_whole)


@dataclass(frozen=True, kw_only=True)
class Gemma2Fields(GemmaFields):
    """The specific fields of a Gemma 2's config.json, with their defaults."""

    vocab_size: int = 256000
    max_position_embeddings: int = 8192
    final_logit_softcapping: float | None = 30.0
    attn_logit_softcapping: float | None = 50.0


GemmaT = TypeVar("GemmaT", bound=GemmaFields)


def gemma_config(given: GemmaFields, *, qk_norm: QKNorm = "none") -> ModelConfig:
    """Return the model of a config.json, with one rotary embedding in all layers."""
    usual = given.query_pre_attn_scalar == given.heads[2]
    config = decoder_config(
        replace(given, hidden_act=given.hidden_activation),
        windows=given.windows,
        bias=given.attention_bias,
        norms="sandwich",
        qk_norm=qk_norm,
        scale=None if usual else given.query_pre_attn_scalar**-0.5,
        softcap=given.attn_logit_softcapping,
    )
    return replace(
        config,
        norm=NormConfig(kind="rms", eps=given.rms_norm_eps, zero_centered=True),
        embedding_scale=given.hidden_size**0.5,
        logit_softcap=given.final_logit_softcapping,
    )


def gemma_fields(kind: type[GemmaT], config: ModelConfig, **rest: Any) -> GemmaT:
    """Return the fields of a model, without the rotary embeddings of layers after the first.

    Args:
        kind: The class of the fields.
        config: The model.
        rest: Further fields of the family.

    Raises:
        ValueError: The first layer is not attention and an MLP.
    """
    mixer, mlp = first_layer(config)
    windows = window_fields(config)
    windows["sliding_window"] = windows["sliding_window"] or GemmaFields.sliding_window
    scalar = mixer.head_dim if mixer.scale is None else round(mixer.scale**-2)
    return decoder_fields(
        kind,
        config,
        hidden_activation=ACTIVATION_NAMES[mlp.activation],
        query_pre_attn_scalar=scalar,
        final_logit_softcapping=config.logit_softcap,
        attn_logit_softcapping=mixer.softcap,
        **windows,
        **rest,
    )


def _write(config: ModelConfig) -> Gemma2Fields:
    return gemma_fields(Gemma2Fields, config)


FAMILY = Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    fields=Gemma2Fields,
    read=gemma_config,
    write=_write,
    links=gemma_links,
)
