"""Keys and values of the tokens a model has already seen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mt_quant import KVFormat

SCALE = "_scale"
"""Behind the name of codes, that of their scales."""


@dataclass(kw_only=True)
class KeptTensors:
    """The tensors that each layer of a stage keeps of the tokens it has seen.

    Attributes:
        layers: For each layer, by its index in the whole model, its tensors by name; the mixer
            states their shapes (`MixerConfig.cache_shapes`). The scales of codes have the name of
            the codes with `_scale`.
        formats: Formats of the layers that keep keys and values in low precision, by index.
    """

    layers: Mapping[int, MutableMapping[str, Tensor]]
    formats: Mapping[int, KVFormat] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors, scales included."""
        return sum(x.nbytes for tensors in self.layers.values() for x in tensors.values())

    def _codes(self, layer: int, name: str, x: Tensor) -> dict[str, Tensor]:
        """Return the tensors to store for new values, [..., heads, D], with scales of their own."""
        format = self.formats.get(layer)
        if format is None:
            return {name: x}
        static = self.layers[layer][name + SCALE].flatten() if format.is_static else None
        x, scale = format.encode(x, static)
        return {name: x} if format.is_static else {name: x, name + SCALE: scale}

    def _values(
        self, layer: int, name: str, dtype: torch.dtype, pick: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return values of a stored tensor, picked and decoded from codes in low precision."""
        held, format = self.layers[layer], self.formats.get(layer)
        x = pick(held[name])
        if format is None:
            return x
        scale = held[name + SCALE]
        return format.decode(x, scale if format.is_static else pick(scale), dtype)


@dataclass(kw_only=True)
class Pages(KeptTensors):
    """Blocks of tokens that requests take as they grow, and rows of recurrent states.

    `GPT.new_pages` makes them; `Slots` say which request has which. A tensor of tokens is
    [blocks, heads, block_size, D], and in memory all heads of a token are side by side.

    Attributes:
        block_size: Number of tokens of a block.
        states: Names of the tensors of each layer with a row for each request, by layer index;
            other tensors have a row for each block.
    """

    block_size: int
    states: Mapping[int, Collection[str]] = field(default_factory=dict)

    def tensors(self, *, states: bool) -> Iterator[Tensor]:
        """Yield the tensors whose rows are blocks, or those whose rows are recurrent states.

        Rows may be copied, within the pages or to host memory and back.
        """
        return (x for _, _, x in self.named_tensors(states=states))

    def named_tensors(self, *, states: bool) -> Iterator[tuple[int, str, Tensor]]:
        """Yield layer, name and tensor of each of `tensors`."""
        for index, tensors in self.layers.items():
            for name, x in tensors.items():
                is_static = name.endswith(SCALE) and self.formats[index].is_static
                if (name in self.states.get(index, ())) == states and not is_static:
                    yield index, name, x

    def write(self, layer: int, name: str, x: Tensor, places: Tensor) -> None:
        """Store a layer's tensor for new tokens; low precision rounds it here, once.

        Args:
            layer: Layer index in the whole model.
            name: Name of the tensor.
            x: Values by head.
            places: Places of the tokens: block * block_size + offset.

        Shape:
            x: [1, T, heads, D]. places: [T].
        """
        for part, value in self._codes(layer, name, x[0]).items():
            held = self.layers[layer][part]
            rows = _bits(held).transpose(1, 2).flatten(0, 1)  # a view, as tokens are in order
            rows.index_copy_(0, places, _bits(value.to(held.dtype)))

    def read(self, layer: int, name: str, dtype: torch.dtype, blocks: Tensor | slice) -> Tensor:
        """Return the values of some blocks, decoded from codes in low precision.

        Args:
            layer: Layer index in the whole model.
            name: Name of the tensor.
            dtype: Dtype of the values.
            blocks: Blocks of each request; or a range of blocks of one, which is not copied.

        Shape:
            blocks: [R, P]. Returns [R, P * block_size, heads, D].
        """

        def pick(x: Tensor) -> Tensor:
            by_token = x.transpose(1, 2)
            if isinstance(blocks, slice):
                return by_token[blocks].flatten(0, 1)[None].transpose(1, 2)
            found = _bits(by_token).index_select(0, blocks.flatten()).view(x.dtype)
            return found.view(len(blocks), -1, *found.shape[2:]).transpose(1, 2)

        return self._values(layer, name, dtype, pick).transpose(1, 2)


@dataclass(kw_only=True)
class KVCache(KeptTensors):
    """The tensors that each layer of a stage keeps for a batch of equally long sequences.

    `GPT.new_cache` makes one. Its tensors keep their shapes while it fills; cross-attention adds
    its own in the first pass.

    Attributes:
        max_length: Number of tokens that fit.
        length: Number of tokens held, with padding; the next pass goes on from here.
        mask: False at the places of padding, [B, max_length]; None without padding.
        place: `length` as a tensor, int64 [], for CUDA graphs; or None.
        beside: Tensors that several layers share, by name: the lengths of the last chunk's
            neighbours, and the hidden states of the chunk that is not finished (Retro).
    """

    max_length: int
    length: int = 0
    mask: Tensor | None = None
    place: Tensor | None = None
    beside: dict[str, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors, scales included."""
        return super().nbytes + sum(x.nbytes for x in self.beside.values())

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
        held = self.layers[layer]
        for part, value in self._codes(layer, name, x).items():
            if places is None:
                held[part] = value.transpose(1, 2)
            else:  # torch copies no fp8 by index on a CPU
                _bits(held[part]).index_copy_(2, places, _bits(value.transpose(1, 2)))

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

        def pick(x: Tensor) -> Tensor:
            return x if places is None else x.index_select(2, places)

        return self._values(layer, name, dtype, pick).transpose(1, 2)


def _bits(x: Tensor) -> Tensor:
    """Return a tensor as torch can copy it by index: fp8 as bytes."""
    return x.view(torch.uint8) if x.is_floating_point() and x.dtype.itemsize == 1 else x
