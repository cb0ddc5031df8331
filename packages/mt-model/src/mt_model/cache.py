"""Keys and values of the tokens a model has already seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Rotated keys, and values, per layer: this rank's heads of a batch of equal-length sequences.

    `GPT.new_cache` makes one.

    Attributes:
        keys: one tensor per layer.
        values: one tensor per layer.

    Shape:
        keys, values: each [B, kv_heads / tp, max_length, head_dim].
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]

    @property
    def max_length(self) -> int:
        """Tokens that fit."""
        return self.keys[0].shape[2]

    def append(self, layer: int, key: Tensor, value: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Store the tokens from position `start` on and return all up to their end.

        Shape:
            key, value: [B, kv_heads / tp, S, head_dim]. Returns the same with start + S tokens.
        """
        end = start + key.shape[2]
        self.keys[layer][:, :, start:end] = key
        self.values[layer][:, :, start:end] = value
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]
