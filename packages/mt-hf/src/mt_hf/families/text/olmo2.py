"""OLMo-2: norms after each branch, and over all queries and all keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from mt_model import ModelConfig

from mt_hf.family.decoder import (
    DecoderFields,
    decoder_config,
    decoder_fields,
    decoder_links,
    first_layer,
)
from mt_hf.family.family import Family

_NORMS = MappingProxyType(
    {
        "post_attention_layernorm": "mixer_output_norm",
        "post_feedforward_layernorm": "feed_forward_output_norm",
    }
)


@dataclass(frozen=True, kw_only=True)
class Olmo2Fields(DecoderFields):
    """The specific fields of an OLMo-2's config.json, with their defaults."""

    vocab_size: int = 50304
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False


def _read(given: Olmo2Fields) -> ModelConfig:
    config = decoder_config(
        given,
        windows=[None] * given.num_hidden_layers,
        qk_norm="whole",
        qkv_bias=given.attention_bias,
        out_bias=given.attention_bias,
    )
    return replace(config, layers=tuple(replace(each, norms="output") for each in config.layers))


def _write(config: ModelConfig) -> Olmo2Fields:
    mixer, _ = first_layer(config)
    return decoder_fields(Olmo2Fields, config, attention_bias=mixer.out_bias)


FAMILY = Family(
    name="olmo2",
    architectures=("Olmo2ForCausalLM",),
    model_types=("olmo2",),
    fields=Olmo2Fields,
    read=_read,
    write=_write,
    links=partial(decoder_links, norms=_NORMS),
)
