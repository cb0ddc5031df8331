"""Gemma 3's text model: Gemma 2 with norms of heads, no caps, and a second rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from mt_files import Checks, shorten
from mt_model import AttentionConfig, LayerConfig, ModelConfig, RopeConfig

from mt_hf.families.text.gemma2 import GemmaFields, gemma_config, gemma_fields, gemma_links
from mt_hf.family.family import Family
from mt_hf.family.rope import check_rope, read_rope, write_rope

_THETA, _LOCAL_THETA = 1e6, 10000.0


@dataclass(frozen=True, kw_only=True)
class Gemma3Fields(GemmaFields):
    """The specific fields of a Gemma 3's config.json, with their defaults.

    `rope_parameters` has a rotary embedding for each type of layer; before version 5 of
    transformers, layers with a window only had `rope_local_base_freq`.
    """

    vocab_size: int = 262208
    max_position_embeddings: int = 131072
    rope_theta: float | None = _THETA
    rope_local_base_freq: float = _LOCAL_THETA
    sliding_window_pattern: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = Checks(self)
        checks.above(0, "rope_local_base_freq")
        checks.at_least(1, "sliding_window_pattern")
        kinds = {"full_attention", "sliding_attention"}
        others = sorted({*(self.rope_parameters or {})} - kinds)
        if others:
            text = f"{shorten(others[0])} is no type of layer; {' and '.join(sorted(kinds))} are"
            checks.add("rope_parameters", text)
        if self.attn_logit_softcapping is not None:
            text = f"{self.attn_logit_softcapping}: transformers leaves it out of Gemma 3; use null"
            checks.add("attn_logit_softcapping", text)
        checks.done()
        check_rope(checks, self, lambda: self.local_rope)
        checks.done()

    @property
    def every_whole(self) -> int:
        """Distance between layers without a window."""
        return self.sliding_window_pattern

    @property
    def rope(self) -> RopeConfig:
        """The rotary embedding of layers without a window."""
        return self._rope_of("full_attention", self.rope_theta, self.rope_scaling)

    @property
    def local_rope(self) -> RopeConfig:
        """The rotary embedding of layers with a window."""
        return self._rope_of("sliding_attention", self.rope_local_base_freq, None)

    def _rope_of(
        self, kind: str, theta: float | None, scaling: Mapping[str, Any] | None
    ) -> RopeConfig:
        new = (self.rope_parameters or {}).get(kind)
        if new is not None and not isinstance(new, Mapping):
            raise ValueError(f"{kind} must be a mapping, got {shorten(new)}")
        longest = self.max_position_embeddings
        return read_rope(_Rope(longest, rope_theta=theta, rope_scaling=new or scaling))


@dataclass(frozen=True)
class _Rope:
    max_position_embeddings: int
    rope_theta: float | None
    rope_scaling: Mapping[str, Any] | None
    rope_parameters: Mapping[str, Any] | None = None


def _read(given: Gemma3Fields) -> ModelConfig:
    config, local = gemma_config(given, qk_norm="head"), given.local_rope

    def layer(each: LayerConfig) -> LayerConfig:
        mixer = cast("AttentionConfig", each.mixer)
        return each if mixer.window is None else replace(each, mixer=replace(mixer, rope=local))

    return replace(config, layers=tuple(map(layer, config.layers)))


def _write(config: ModelConfig) -> Gemma3Fields:
    found: dict[bool, RopeConfig | None] = {}
    for layer in config.layers:
        if isinstance(layer.mixer, AttentionConfig):
            found.setdefault(layer.mixer.window is None, layer.mixer.rope)
    whole, local = found.get(True, RopeConfig(theta=_THETA)), found.get(False)
    theta = _LOCAL_THETA if local is None else local.theta
    fields = gemma_fields(Gemma3Fields, config, rope_local_base_freq=theta)
    return replace(fields, **write_rope(whole))


FAMILY = Family(
    name="gemma3_text",
    architectures=("Gemma3ForCausalLM",),
    fields=Gemma3Fields,
    read=_read,
    write=_write,
    links=gemma_links,
)
