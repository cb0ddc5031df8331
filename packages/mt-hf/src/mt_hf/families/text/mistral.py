"""Mistral: Llama with a sliding window in every layer or in none."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from mt_model import ModelConfig

from mt_hf.family.decoder import DecoderFields, decoder_config, decoder_fields, decoder_links
from mt_hf.family.family import Family


@dataclass(frozen=True, kw_only=True)
class MistralFields(DecoderFields):
    """The specific fields of a Mistral's config.json, with their defaults."""

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096


def _read(given: MistralFields) -> ModelConfig:
    return decoder_config(given, windows=[given.sliding_window] * given.num_hidden_layers)


FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    fields=MistralFields,
    read=_read,
    write=partial(decoder_fields, MistralFields),
    links=decoder_links,
)
