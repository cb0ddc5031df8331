"""Qwen2 and Qwen2.5: biases of queries, keys and values, and windows in the upper layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mt_model import ModelConfig

from mt_hf.family.decoder import decoder_config, decoder_fields, decoder_links
from mt_hf.family.family import Family
from mt_hf.family.windows import WindowFields, window_fields, windows_of


@dataclass(frozen=True, kw_only=True)
class QwenFields(WindowFields):
    """The specific fields of a Qwen's config.json, with their defaults.

    `layer_types` lists the layers with a window; without it, the layers from `max_window_layers` on
    have one.
    """

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    max_window_layers: int = 28

    @property
    def window(self) -> int | None:
        """Window size of a layer with a window."""
        return self.sliding_window if self.use_sliding_window else None

    def slides(self, layer: int) -> bool:
        """Return whether a layer has a window if `layer_types` is missing."""
        return layer >= self.max_window_layers


def qwen_windows(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of the windows of a model's layers.

    Raises:
        ValueError: Layers have different windows.
    """
    windows = windows_of(config)
    sizes = {size for size in windows if size is not None}
    if len(sizes) > 1:
        raise ValueError(f"the layers have the windows {sorted(sizes)}, and there can be one")
    first = next((i for i, size in enumerate(windows) if size is not None), len(windows))
    return {**window_fields(config), "use_sliding_window": bool(sizes), "max_window_layers": first}


@dataclass(frozen=True, kw_only=True)
class Qwen2Fields(QwenFields):
    """The specific fields of a Qwen2's config.json."""


def _read(given: Qwen2Fields) -> ModelConfig:
    return decoder_config(given, windows=given.windows, qkv_bias=True)


def _write(config: ModelConfig) -> Qwen2Fields:
    return decoder_fields(Qwen2Fields, config, **qwen_windows(config))


FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    fields=Qwen2Fields,
    read=_read,
    write=_write,
    links=decoder_links,
)
