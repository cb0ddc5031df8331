"""Keys and values of the tokens a model has already seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(kw_only=True)
class KVCache:
    """What each layer of a stage keeps of a batch of equal-length sequences.

    `GPT.new_cache` makes one. Its tensors keep their shapes while it fills.

    Attributes:
        layers: tensors by name, by the layer's global index; their shapes are the mixer's
            (`MixerConfig.cache_shapes`).
        max_length: tokens that fit.
        length: tokens that it holds; those of the next pass follow them.
    """

    layers: Mapping[int, Mapping[str, Tensor]]
    max_length: int
    length: int = 0
