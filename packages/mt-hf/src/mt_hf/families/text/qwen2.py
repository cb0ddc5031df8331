"""Qwen2 and Qwen2.5: biases of queries, keys and values, and windows in the upper layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from mt_files import Checks
from mt_model import AttentionConfig, ModelConfig

from mt_hf.family.decoder import (
    DecoderFields,
    decoder_config,
    decoder_fields,
    decoder_links,
)
from mt_hf.family.family import Family

LayerType: TypeAlias = Literal["full_attention", "sliding_attention"]


@dataclass(frozen=True, kw_only=True)
class QwenFields(DecoderFields):
    """The specific fields of a Qwen's config.json, with their defaults.

    `layer_types` lists the layers with a window; without it, the layers from `max_window_layers` on
    have one.
    """

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[LayerType, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = Checks(self)
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            text = f"{len(self.layer_types)} of them for {self.num_hidden_layers} layers"
            checks.add("layer_types", text)
        if "sliding_attention" in (self.layer_types or ()) and self.window is None:
            checks.add("layer_types", "has sliding_attention, but there is no sliding_window")
        checks.done()

    @property
    def window(self) -> int | None:
        """Window size of a layer with a window."""
        return self.sliding_window if self.use_sliding_window else None

    @property
    def windows(self) -> list[int | None]:
        """The window of each layer."""
        count, types = self.num_hidden_layers, self.layer_types
        if types is None:
            slides = [index >= self.max_window_layers for index in range(count)]
        else:
            slides = [kind == "sliding_attention" for kind in types]
        return [self.window if slide else None for slide in slides]


def window_fields(config: ModelConfig) -> dict[str, object]:
    """Return the fields of the windows of a model's layers.

    Raises:
        ValueError: Layers have different windows.
    """
    mixers = [layer.mixer for layer in config.layers]
    found = [mixer.window for mixer in mixers if isinstance(mixer, AttentionConfig)]
    windows = {window for window in found if window is not None}
    if len(windows) > 1:
        raise ValueError(f"the layers have the windows {sorted(windows)}, and there can be one")
    types = ["full_attention" if window is None else "sliding_attention" for window in found]
    first = next((i for i, window in enumerate(found) if window is not None), len(found))
    return {
        "use_sliding_window": bool(windows),
        "sliding_window": next(iter(windows), None),
        "max_window_layers": first,
        "layer_types": tuple(types),
    }


@dataclass(frozen=True, kw_only=True)
class Qwen2Fields(QwenFields):
    """The specific fields of a Qwen2's config.json."""


def _read(given: Qwen2Fields) -> ModelConfig:
    return decoder_config(given, windows=given.windows, qkv_bias=True)


def _write(config: ModelConfig) -> Qwen2Fields:
    return decoder_fields(Qwen2Fields, config, **window_fields(config))


FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    fields=Qwen2Fields,
    read=_read,
    write=_write,
    links=decoder_links,
)
