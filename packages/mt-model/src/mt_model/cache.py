"""Keys and values of the tokens a model has already seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """What each layer keeps of a batch of equal-length sequences; attention: keys and values.

    `GPT.new_cache` makes one.

    Attributes:
        layers: tensors by name, by the layer's global index; their shapes are the mixer's
            (`MixerConfig.cache_shapes`).
        max_length: tokens that fit.
    """

    layers: Mapping[int, Mapping[str, Tensor]]
    max_length: int

    def append(self, layer: int, key: Tensor, value: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Store the tokens from position `start` on and return all up to their end.

        Shape:
            key, value: [B, kv_heads / tp, S, head_dim]. Returns the same with start + S tokens.
        """
        end, held = start + key.shape[2], self.layers[layer]
        held["key"][:, :, start:end] = key
        held["value"][:, :, start:end] = value
        return held["key"][:, :, :end], held["value"][:, :, :end]
