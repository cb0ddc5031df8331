"""Sequences that are cut into chunks, whose tokens see each other only."""

from __future__ import annotations

import torch
from torch import Tensor


def chunk_documents(documents: Tensor | None, chunk: int, *, like: Tensor, length: int) -> Tensor:
    """Return ids that are equal where two tokens are of one document and of one chunk of it.

    Args:
        documents: Ids of packed documents; None where each row is one.
        chunk: Tokens in each chunk of a document, from its first one on.
        like: Has the rows and the device.
        length: Of the whole sequences.

    Shape:
        documents: [B, S]; like: [B, ...]. Returns [B, S] of int64.
    """
    places = torch.arange(length, device=like.device).expand(like.shape[0], -1)
    if documents is None:
        return places.div(chunk, rounding_mode="floor")
    first = _first_places(documents)
    return first * length + (places - first).div(chunk, rounding_mode="floor")


def _first_places(documents: Tensor) -> Tensor:
    """Return for each token the place of the first one of its document in the row.

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
