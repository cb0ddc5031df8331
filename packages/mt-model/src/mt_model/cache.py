"""Keys and values of the tokens a model has already seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mt_model.gpt import GPT


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Rotated keys, and values, per layer: this rank's heads of a batch of equal-length sequences.

    Attributes:
        keys: one tensor per layer.
        values: one tensor per layer.

    Shape:
        keys, values: each [B, kv_heads / tp, max_length, head_dim].
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]

    @classmethod
    def allocate(cls, model: GPT, *, batch_size: int, max_length: int) -> KVCache:
        """A cache for `model`, on its device and in its dtype.

        Raises:
            ValueError: `max_length` is longer than the model's sequences.
        """
        limit = model.config.max_sequence_length
        if not 0 < max_length <= limit:
            raise ValueError(
                f"max_length={max_length} is not between 1 and max_sequence_length={limit}"
            )
        shapes = [
            (batch_size, layer.attention.num_kv_heads, max_length, layer.attention.head_dim)
            for layer in model.stage_layers()
        ]
        dtype, device = model.placement.dtype, model.placement.device
        keys = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        return cls(keys=keys, values=[torch.zeros_like(key) for key in keys])

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
