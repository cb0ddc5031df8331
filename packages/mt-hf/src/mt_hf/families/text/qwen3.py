"""Qwen3: norms of each head's queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

from mt_model import ModelConfig

from mt_hf.families.text.qwen2 import QwenFields, qwen_windows
from mt_hf.family.decoder import decoder_config, decoder_fields, decoder_links
from mt_hf.family.family import Family


@dataclass(frozen=True, kw_only=True)
class Qwen3Fields(QwenFields):
    """The specific fields of a Qwen3's config.json, with their defaults."""

    head_dim: int | None = 128
    attention_bias: bool = False


def _read(given: Qwen3Fields) -> ModelConfig:
    bias = given.attention_bias
    return decoder_config(given, windows=given.windows, bias=bias, qk_norm="head")


def _write(config: ModelConfig) -> Qwen3Fields:
    return decoder_fields(Qwen3Fields, config, **qwen_windows(config))


FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    fields=Qwen3Fields,
    read=_read,
    write=_write,
    links=decoder_links,
)
