"""Llama 1 to 3.x."""

from __future__ import annotations

from dataclasses import dataclass

from mt_model import ModelConfig

from mt_hf.family.decoder import (
    DecoderFields,
    decoder_config,
    decoder_fields,
    decoder_links,
    first_layer,
)
from mt_hf.family.family import Family


@dataclass(frozen=True, kw_only=True)
class LlamaFields(DecoderFields):
    """The specific fields of a Llama's config.json."""

    attention_bias: bool = False
    mlp_bias: bool = False


def _read(given: LlamaFields) -> ModelConfig:
    return decoder_config(
        given,
        windows=[None] * given.num_hidden_layers,
        qkv_bias=given.attention_bias,
        out_bias=given.attention_bias,
        mlp_bias=given.mlp_bias,
    )


def _write(config: ModelConfig) -> LlamaFields:
    mixer, mlp = first_layer(config)
    bias = {"attention_bias": mixer.out_bias, "mlp_bias": mlp.bias}
    return decoder_fields(LlamaFields, config, **bias)


FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    model_types=("llama",),
    fields=LlamaFields,
    read=_read,
    write=_write,
    links=decoder_links,
)
