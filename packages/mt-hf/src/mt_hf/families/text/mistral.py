"""Mistral: Llama with a sliding window in every layer or in none."""

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
class MistralFields(DecoderFields):
    """The specific fields of a Mistral's config.json, with their defaults."""

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096


def _read(given: MistralFields) -> ModelConfig:
    return decoder_config(given, windows=[given.sliding_window] * given.num_hidden_layers)


def _write(config: ModelConfig) -> MistralFields:
    mixer, _ = first_layer(config)
    return decoder_fields(MistralFields, config, sliding_window=mixer.window)


FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    model_types=("mistral",),
    fields=MistralFields,
    read=_read,
    write=_write,
    links=decoder_links,
)
