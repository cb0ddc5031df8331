"""Causal softmax attention in plain operations: the form the fast ones are tested against."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax attention in plain operations; the last query sees every key.

    Args:
        query: rotated queries.
        key: rotated keys; each serves `N // G` consecutive query heads.
        value: values.

    Shape:
        query: [B, N, S, D]; key, value: [B, G, T, D]. Returns [B, N, S, D].
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    seen = causal_mask(query.shape[2], key.shape[2], query.device)
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    probs = torch.softmax(wide.masked_fill(~seen, float("-inf")), dim=-1).to(scores.dtype)
    return probs @ value


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """True where a query sees a key, the last query being at the last key.

    Shape:
        Returns [queries, keys].
    """
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
