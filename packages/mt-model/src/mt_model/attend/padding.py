"""Batches whose rows have padding on the left or on the right."""

from __future__ import annotations

import torch
from torch import Tensor


def positions_of(mask: Tensor) -> Tensor:
    """Count the tokens before each place, so that a padded row keeps its unpadded positions.

    Shape:
        mask: [B, S], True where a token is. Returns the same of int64; -1 before the first token.
    """
    return mask.cumsum(1) - 1


def padding_as_document(mask: Tensor, documents: Tensor | None) -> Tensor:
    """Make the padding of each row a packed document of its own, which no token sees.

    Outputs at padding are meaningless but finite, since padding sees padding.

    Shape:
        mask: [B, S], True where a token is; documents: [B, S] or None. Returns [B, S].
    """
    if documents is None:
        return mask.long()
    return torch.where(mask, documents, documents.min() - 1)


def last_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the features of the last token of each row.

    Shape:
        x: [B, S, n]; mask: [B, S], True where a token is, or None. Returns [B, 1, n].
    """
    if mask is None:
        return x[:, -1:]
    place = torch.arange(mask.shape[1], device=x.device)
    last = (mask * place).argmax(1)
    return x.gather(1, last[:, None, None].expand(-1, 1, x.shape[2]))
