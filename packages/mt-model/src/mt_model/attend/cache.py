"""Keys and values of the tokens a model has already seen."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mt_quant import KVFormat

SCALE = "_scale"
"""Behind the name of codes, that of their scales."""


@dataclass(kw_only=True)
class KVCache:
    """The tensors that each layer of a stage keeps for a batch of equally long sequences.

    `GPT.new_cache` makes one. Its tensors keep their shapes while it fills.

    Attributes:
        layers: For each layer, by its index in the whole model, its tensors by name; the mixer
            states their shapes (`MixerConfig.cache_shapes`). Cross-attention adds its own in the
            first pass. The scales of codes have the name of the codes with `_scale`.
        max_length: Number of tokens that fit.
        length: Number of tokens held, with padding; the next pass goes on from here.
        mask: False at the places of padding, [B, max_length]; None without padding.
        place: `length` as a tensor, int64 [], for CUDA graphs; or None.
        formats: Formats of the layers that keep keys and values in low precision, by index.
    """

    layers: Mapping[int, MutableMapping[str, Tensor]]
    max_length: int
    length: int = 0
    mask: Tensor | None = None
    place: Tensor | None = None
    formats: Mapping[int, KVFormat] = field(default_factory=dict)

    def places(self, count: int, device: torch.device) -> Tensor:
        """Return the places of the tokens of the next pass, [count]."""
        if self.place is None:
            return torch.arange(self.length, self.length + count, device=device)
        return self.place + torch.arange(count, device=device)

    def note(self, mask: Tensor | None) -> None:
        """Record which tokens of the next pass are padding.

        Args:
            mask: [B, S], True where a token is; None where all are.
        """
        if mask is None:
            return
        if self.mask is None:
            self.mask = mask.new_ones(mask.shape[0], self.max_length)
        self.mask[:, self.length : self.length + mask.shape[1]] = mask

    def write(self, layer: int, name: str, x: Tensor, places: Tensor | None = None) -> None:
        """Store a layer's tensor for new tokens; low precision rounds it here, once.

        Args:
            layer: Layer index in the whole model.
            name: Name of the tensor.
            x: Values by head.
            places: Places of the tokens in the cache; None replaces the whole tensor.

        Shape:
            x: [B, S, heads, D]. places: [S].
        """
        held, format = self.layers[layer], self.formats.get(layer)
        if format is not None:
            static = held[name + SCALE].flatten() if format.is_static else None
            x, scale = format.encode(x, static)
            if static is None:
                _put(held, name + SCALE, scale.transpose(1, 2), places)
        _put(held, name, x.transpose(1, 2), places)

    def read(
        self, layer: int, name: str, dtype: torch.dtype, places: Tensor | None = None
    ) -> Tensor:
        """Return the values of a stored tensor, decoded from codes in low precision.

        Args:
            layer: Layer index in the whole model.
            name: Name of the tensor.
            dtype: Dtype of the values.
            places: Places to read; None for all.

        Shape:
            Returns [B, places, heads, D].
        """
        held, format = self.layers[layer], self.formats.get(layer)
        x = held[name] if places is None else held[name].index_select(2, places)
        if format is not None:
            scale = held[name + SCALE]
            if places is not None and not format.is_static:
                scale = scale.index_select(2, places)
            x = format.decode(x, scale, dtype)
        return x.transpose(1, 2)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors, scales included."""
        return sum(x.nbytes for tensors in self.layers.values() for x in tensors.values())


def _put(held: MutableMapping[str, Tensor], name: str, x: Tensor, places: Tensor | None) -> None:
    if places is None:
        held[name] = x
        return
    into = held[name]
    if x.dtype.itemsize == 1:  # torch copies no fp8 by index on a CPU
        into, x = into.view(torch.uint8), x.view(torch.uint8)
    into.index_copy_(2, places, x)
