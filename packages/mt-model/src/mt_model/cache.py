"""Keys and values of the tokens a model has already seen."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(kw_only=True)
class KVCache:
    """What each layer of a stage keeps of a batch of equal-length sequences.

    `GPT.new_cache` makes one. Its tensors keep their shapes while it fills.

    Attributes:
        layers: tensors by name, by the layer's global index; their shapes are the mixer's
            (`MixerConfig.cache_shapes`). Cross-attention adds its own in the first pass.
        max_length: tokens that fit.
        length: tokens that it holds, padding too; those of the next pass follow them.
        mask: False at the places of padding, [B, max_length]; None where there is none.
        place: `length` as a tensor, int64 [], which a CUDA graph reads in its stead, or None.
    """

    layers: Mapping[int, MutableMapping[str, Tensor]]
    max_length: int
    length: int = 0
    mask: Tensor | None = None
    place: Tensor | None = None

    def places(self, count: int, device: torch.device) -> Tensor:
        """Return the places of the tokens of the next pass, [count]."""
        if self.place is None:
            return torch.arange(self.length, self.length + count, device=device)
        return self.place + torch.arange(count, device=device)

    def note(self, mask: Tensor | None) -> None:
        """Note which of the tokens of the next pass are padding.

        Args:
            mask: [B, S], True where a token is; None where all are.
        """
        if mask is None:
            return
        if self.mask is None:
            self.mask = mask.new_ones(mask.shape[0], self.max_length)
        self.mask[:, self.length : self.length + mask.shape[1]] = mask
