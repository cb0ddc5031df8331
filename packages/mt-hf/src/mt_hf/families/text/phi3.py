"""Phi-3 and Phi-4: fused projections, LongRoPE, and partial rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mt_files import Checks
from mt_model import AttentionConfig, LongropeScaling, MLPConfig, ModelConfig, RopeConfig

from mt_hf.family.decoder import (
    DecoderFields,
    decoder_config,
    decoder_fields,
    decoder_links,
    first_layer,
)
from mt_hf.family.family import Family
from mt_hf.family.link import Link, leaves
from mt_hf.family.rope import read_rope

_KINDS = ("default", "longrope", "su")


@dataclass(frozen=True, kw_only=True)
class Phi3Fields(DecoderFields):
    """The specific fields of a Phi-3's config.json, with their defaults.

    `pad_token_id` changes nothing, but is always written, because the default of transformers
    may lie outside the vocabulary.
    """

    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    original_max_position_embeddings: int = 4096
    partial_rotary_factor: float = 1.0
    sliding_window: int | None = None
    resid_pdrop: float = 0.0
    embd_pdrop: float = 0.0
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = Checks(self)
        checks.at_least(1, "sliding_window")
        if self.embd_pdrop != self.resid_pdrop:
            checks.add("embd_pdrop", f"{self.embd_pdrop} is not resid_pdrop={self.resid_pdrop}")
        checks.done()

    @property
    def rope(self) -> RopeConfig:
        """The rotary embedding; `partial_rotary_factor` may be in `rope_parameters` or not."""
        found: dict[str, Any] = dict(self.rope_scaling or self.rope_parameters or {})
        kind = found.get("rope_type") or found.get("type") or "default"
        if kind not in _KINDS:
            raise ValueError(f"the rope_type {kind!r} is not one of {', '.join(_KINDS)}")
        config = read_rope(self, partial=True)
        if found.get("partial_rotary_factor") is None:
            config = replace(config, fraction=self.partial_rotary_factor)
        return config


def _read(given: Phi3Fields) -> ModelConfig:
    config = decoder_config(given, windows=[given.sliding_window] * given.num_hidden_layers)
    return replace(config, dropout=given.resid_pdrop)


def _write(config: ModelConfig) -> Phi3Fields:
    mixer, _ = first_layer(config)
    rest: dict[str, Any] = {}
    if mixer.rope is not None:
        rest["partial_rotary_factor"] = mixer.rope.fraction
        if isinstance(mixer.rope.scaling, LongropeScaling):
            rest["original_max_position_embeddings"] = mixer.rope.scaling.original_length
    return decoder_fields(
        Phi3Fields, config, resid_pdrop=config.dropout, embd_pdrop=config.dropout, **rest
    )


def _attention(source: str, target: str, mixer: AttentionConfig, hidden: int) -> Iterator[Link]:
    """Yield the rows of queries, keys and values, and the output projection."""
    queries, groups = mixer.queries_per_group, mixer.num_kv_heads
    rows, start = groups * (queries + 2) * mixer.head_dim, 0
    for place in ((0, queries), (queries, queries + 1), (queries + 1, queries + 2)):
        stop = start + groups * (place[1] - place[0]) * mixer.head_dim
        yield Link(
            source=f"{source}.qkv_proj.weight",
            shape=(rows, hidden),
            target=f"{target}.qkv.weight",
            part={0: (start, stop)},
            box={1: place},
        )
        start = stop
    back = (hidden, mixer.num_heads * mixer.head_dim)
    yield from leaves(f"{source}.o_proj", f"{target}.out", *back, bias=False)


def _mlp(source: str, target: str, mlp: MLPConfig, hidden: int) -> Iterator[Link]:
    """Yield the rows of gate and up, one after the other, and the projection down."""
    ffn = mlp.ffn_size
    yield from leaves(f"{source}.gate_up_proj", f"{target}.up", 2 * ffn, hidden, bias=False)
    yield from leaves(f"{source}.down_proj", f"{target}.down", hidden, ffn, bias=False)


FAMILY = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    fields=Phi3Fields,
    read=_read,
    write=_write,
    links=partial(decoder_links, attention=_attention, mlp=_mlp),
)
