"""Attention to the keys and values of a cache, for generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mt_model.attend.cache import KVCache
from mt_model.attend.context import ForwardContext, Recurrence
from mt_model.attend.kept import KeptAttend, View
from mt_model.attend.padding import positions_of
from mt_model.attend.seen import seen


@dataclass(frozen=True, kw_only=True)
class CachedAttend(KeptAttend):
    """Causal attention to a cache, which first takes in the new keys and values.

    It reads all of the cache's places, or as many as the layer's window has, and masks the empty
    ones, so that no shape depends on the number of tokens held.

    Attributes:
        cache: Cache of this stage.
        places: Places of the new tokens in the cache, [S].
    """

    cache: KVCache
    places: Tensor
    _views: dict[Any, list[View]] = field(default_factory=dict)

    @property
    def room(self) -> int:
        """Number of tokens that a row has room for."""
        return self.cache.max_length

    def put(self, layer: int, new: Mapping[str, Tensor]) -> None:
        """Store the new tokens; see `KeptAttend`."""
        for name, x in new.items():
            self.cache.write(layer, name, x, self.places)

    def read(self, layer: int, name: str, dtype: torch.dtype, view: View) -> Tensor:
        """Return the values at some places; see `KeptAttend`."""
        assert not isinstance(view.kept, slice), "places are a tensor"  # noqa: S101
        return self.cache.read(layer, name, dtype, view.kept)

    def recur(
        self, layer: int, run: Recurrence, inputs: Sequence[Tensor], shared: ForwardContext
    ) -> Tensor:
        """Run a recurrent layer from the kept state, zeros before the first token; see `Attend`.

        Raises:
            ValueError: There is padding after the first tokens, which a state can't leave out.
        """
        held, tokens = self.cache.layers[layer], shared.documents
        if tokens is not None and not (tokens if self.cache.length else tokens[:, -1]).all():
            raise ValueError(
                f"layer {layer} keeps a state of the tokens, and the mask has padding behind some "
                "of them; put all padding in front, and give no more of it later"
            )
        if self.cache.length == 0:
            for tensor in held.values():
                tensor.zero_()
        found, kept = run(*inputs, held, tokens)
        for name, tensor in kept.items():
            held[name].copy_(tensor.detach())
        return found

    def views(self, window: int | None, chunk: int | None) -> list[View]:
        """Return one view of all queries, made once for equal layers."""
        found = self._views.get((window, chunk))
        if found is None:
            block = self.block(window, chunk)
            allowed = self.allowed(window, chunk, block=block)
            made = View(None, block, allowed, *self.positions(block))
            found = self._views[window, chunk] = [made]
        return found

    def block(self, window: int | None, chunk: int | None = None) -> Tensor | None:
        """Return the places that the new tokens may see, in order; None for all of the cache.

        Their number does not depend on the length held. With padding between tokens a window does
        not bound the number of places, so all are read.

        Shape:
            Returns [places].
        """
        near = window if chunk is None else chunk
        size = 0 if near is None else near + self.places.shape[0] - 1
        if near is None or self.cache.mask is not None or size >= self.cache.max_length:
            return None
        start = (self.places[0] - near + 1).clamp(min=0)
        return start + torch.arange(size, device=self.places.device)

    def positions(self, block: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return positions of the new tokens and of places: [S] and [T], or [B, ...] with padding.

        Args:
            block: The places; None for all.
        """
        mask, device = self.cache.mask, self.places.device
        if block is not None:
            return self.places, block
        if mask is None:
            return self.places, torch.arange(self.cache.max_length, device=device)
        positions = positions_of(mask)
        return positions.index_select(1, self.places), positions

    def allowed(
        self, window: int | None, chunk: int | None = None, *, block: Tensor | None = None
    ) -> Tensor:
        """Return the mask of places that each new token sees: [S, T], or [B, 1, S, T] with padding.

        Padding sees itself, since a softmax over nothing is not a number.

        Args:
            window: Window of the layer.
            chunk: Chunk of the layer.
            block: Places of the keys; None for all.
        """
        near, mask = seen(*self.positions(block), window, chunk=chunk), self.cache.mask
        if mask is None:
            return near
        places = torch.arange(self.cache.max_length, device=mask.device)
        return ((near & mask[:, None]) | (self.places[:, None] == places))[:, None]
