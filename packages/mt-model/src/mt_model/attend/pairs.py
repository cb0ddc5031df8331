"""The pairs of queries and keys that count, and blocks of queries with the same keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mt_model.attend.seen import seen

BLOCK = 128  # queries that have the same keys


class Block(NamedTuple):
    """A block of queries with the same keys."""

    queries: range
    keys: range

    @property
    def size(self) -> int:
        """Number of pairs of a head."""
        return len(self.queries) * len(self.keys)

    def of_keys(self, heads: Tensor) -> Tensor:
        """Return the rows of its keys: [BG, S, D] -> [BG, keys, D]."""
        return heads[:, self.keys.start : self.keys.stop]


class Pairs(NamedTuple):
    """The keys that a query sees.

    Attributes:
        causal: Only keys up to the query's own place.
        window: Only keys less than `window` places away; None for all.
        documents: Only keys of the query's document, by ids; None where there is one document.

    Shape:
        documents: [B, S].
    """

    causal: bool = True
    window: int | None = None
    documents: Tensor | None = None

    def allowed(self, queries: range, keys: range, device: torch.device) -> Tensor:
        """Return a mask, True where a query sees a key.

        Shape:
            Returns [queries, keys], or [B, queries, keys] with documents.
        """
        query, key = (torch.arange(own.start, own.stop, device=device) for own in (queries, keys))
        near = seen(query, key, self.window, causal=self.causal)
        if self.documents is None:
            return near
        query, key = (self.documents[:, own.start : own.stop] for own in (queries, keys))
        return near & (query[:, :, None] == key[:, None, :])

    def hide_(self, scores: Tensor, queries: range, keys: range) -> None:
        """Set the scores of pairs that do not count to minus infinity, in place.

        Shape:
            scores: [B, heads, queries, keys].
        """
        is_plain = self.window is None and self.documents is None
        if is_plain and not self.causal:
            return
        if is_plain:  # all keys before the block count
            keys, scores = queries, scores[..., -len(queries) :]
        hidden = ~self.allowed(queries, keys, scores.device)
        scores.masked_fill_(hidden[:, None] if hidden.dim() == 3 else hidden, -torch.inf)

    def blocks(self, length: int) -> list[Block]:
        """Cut queries into blocks, each with the keys that any of it may see."""
        if not self.causal and self.window is None:
            return [Block(range(length), range(length))]
        far = length if self.window is None else self.window - 1
        found = []
        for start in range(0, length, BLOCK):
            stop = min(start + BLOCK, length)
            end = stop if self.causal else min(stop + far, length)
            found.append(Block(range(start, stop), range(max(0, start - far), end)))
        return found
