"""mT5: a multilingual T5 1.1 with a separate, unscaled head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from mt_hf.families.text import t5
from mt_hf.families.text.t5 import EncoderDecoderFields, fields_of


@dataclass(frozen=True, kw_only=True)
class MT5Fields(EncoderDecoderFields):
    """The fields of an mT5's config.json, with the defaults of transformers.

    T5's page explains them. transformers treats every `tie_word_embeddings` as true; the folder's
    tensors decide whether the head is tied.
    """

    vocab_size: int = 250112
    d_ff: int = 1024
    num_layers: int = 8
    num_heads: int = 6
    feed_forward_proj: str = "gated-gelu"


FAMILY = replace(
    t5.FAMILY,
    name="mt5",
    architectures=("MT5ForConditionalGeneration",),
    model_types=("mt5",),
    fields=MT5Fields,
    refused={"MT5EncoderModel": t5.WITHOUT_HEAD.format("MT5")},
    write=partial(fields_of, MT5Fields),
    like="t5",
)
