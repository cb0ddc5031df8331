"""OLMo-2: norms after each branch, and over all queries and all keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from mt_model import ModelConfig

from mt_hf.family.decoder import DecoderFields, decoder_config, decoder_fields, decoder_links
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
    return decoder_config(given, bias=given.attention_bias, norms="output", qk_norm="whole")


FAMILY = Family(
    name="olmo2",
    architectures=("Olmo2ForCausalLM",),
    fields=Olmo2Fields,
    read=_read,
    write=partial(decoder_fields, Olmo2Fields),
    links=partial(decoder_links, norms=_NORMS),
)
