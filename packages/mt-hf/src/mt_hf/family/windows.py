"""Decoders whose layers may have a sliding window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from mt_files import Checks
from mt_model import AttentionConfig, ModelConfig

from mt_hf.family.decoder import DecoderFields

_FULL, _SLIDING = "full_attention", "sliding_attention"
LayerType: TypeAlias = Literal["full_attention", "sliding_attention"]


@dataclass(frozen=True, kw_only=True)
class WindowFields(DecoderFields):
    """Fields of a decoder with a window in some layers, which `layer_types` may list."""

    sliding_window: int | None = 4096
    layer_types: tuple[LayerType, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = Checks(self)
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            text = f"{len(self.layer_types)} of them for {self.num_hidden_layers} layers"
            checks.add("layer_types", text)
        if _SLIDING in (self.layer_types or ()) and self.window is None:
            checks.add("layer_types", f"has {_SLIDING}, but there is no sliding_window")
        checks.done()

    @property
    def window(self) -> int | None:
        """Window size of a layer with a window."""
        return self.sliding_window

    def slides(self, layer: int) -> bool:
        """Return whether a layer has a window if `layer_types` is missing."""
        del layer
        return False

    @property
    def windows(self) -> list[int | None]:
        """The window of each layer."""
        if self.layer_types is None:
            slides = [self.slides(index) for index in range(self.num_hidden_layers)]
        else:
            slides = [kind == _SLIDING for kind in self.layer_types]
        return [self.window if slide else None for slide in slides]


def windows_of(config: ModelConfig) -> list[int | None]:
    """Return the window of each layer with attention."""
    mixers = [layer.mixer for layer in config.layers]
    return [mixer.window for mixer in mixers if isinstance(mixer, AttentionConfig)]


def whole_and_local(
    config: ModelConfig,
) -> tuple[AttentionConfig | None, AttentionConfig | None]:
    """Return the attention of the first layer without a window, and of the first with one."""
    mixers = [layer.mixer for layer in config.layers if isinstance(layer.mixer, AttentionConfig)]
    whole = next((mixer for mixer in mixers if mixer.window is None), None)
    return whole, next((mixer for mixer in mixers if mixer.window is not None), None)


def window_fields(config: ModelConfig) -> dict[str, Any]:
    """Return `sliding_window` and `layer_types` of a model; the caller compares all layers."""
    windows = windows_of(config)
    return {
        "sliding_window": next((size for size in windows if size is not None), None),
        "layer_types": tuple(_FULL if size is None else _SLIDING for size in windows),
    }


def window_period(windows: Sequence[int | None], usual: int) -> int | None:
    """Return the distance between layers without a window, the last of each group.

    Args:
        windows: Window of each layer.
        usual: The distance to return if it fits.

    Returns:
        The distance; None if it is not the same for all.
    """
    slides = [size is not None for size in windows]
    periods = (usual, *range(1, len(windows) + 2))
    fits = (p for p in periods if slides == [bool((i + 1) % p) for i in range(len(windows))])
    return next(fits, None)
