"""Llama 1 to 3.x."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from mt_model import ModelConfig

from mt_hf.family.decoder import DecoderFields, decoder_config, decoder_fields, decoder_links
from mt_hf.family.family import Family


@dataclass(frozen=True, kw_only=True)
class LlamaFields(DecoderFields):
    """The specific fields of a Llama's config.json."""

    attention_bias: bool = False
    mlp_bias: bool = False


def _read(given: LlamaFields) -> ModelConfig:
    return decoder_config(given, bias=given.attention_bias, mlp_bias=given.mlp_bias)


FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    fields=LlamaFields,
    read=_read,
    write=partial(decoder_fields, LlamaFields),
    links=decoder_links,
)
