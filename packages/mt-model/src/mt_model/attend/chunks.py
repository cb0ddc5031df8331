"""Sequences in chunks whose tokens see only each other."""

from __future__ import annotations

import torch
from torch import Tensor


def chunk_documents(documents: Tensor | None, chunk: int, *, like: Tensor, length: int) -> Tensor:
    """Return ids that are equal for two tokens of the same chunk of the same document.

    Args:
        documents: Ids of packed documents; None where each row is one.
        chunk: Number of tokens of a chunk, counted from the document's first token.
        like: Tensor with the rows and the device of the result.
        length: Length of the whole sequences.

    Shape:
        documents: [B, S]; like: [B, ...]. Returns [B, S] of int64.
    """
    places = torch.arange(length, device=like.device).expand(like.shape[0], -1)
    if documents is None:
        return places.div(chunk, rounding_mode="floor")
    first = _first_places(documents)
    return first * length + (places - first).div(chunk, rounding_mode="floor")


def _first_places(documents: Tensor) -> Tensor:
    """Return for each token the place of its document's first token in the row.

    Shape:
        documents: [B, S]. Returns the same of int64.
    """
    order = documents.argsort(dim=1, stable=True)
    ids = documents.gather(1, order)
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    rank = torch.arange(documents.shape[1], device=documents.device)
    run = (begins * rank).cummax(1).values
    return torch.empty_like(order).scatter_(1, order, order.gather(1, run))
