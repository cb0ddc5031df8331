"""Causal softmax attention in plain operations: the form the fast ones are tested against."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_attention(  # noqa: PLR0913 - the options of one operation, by keyword
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    allowed: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """Softmax attention in plain operations.

    Args:
        query: rotated queries.
        key: rotated keys; each serves `N // G` consecutive query heads.
        value: values.
        allowed: True where a query sees a key; causal where None, the last query seeing every key.
        scale: of the scores; 1 / sqrt(D) where None.
        softcap: scores become `softcap * tanh(score / softcap)`.
        sinks: a logit per query head in the softmax, without a value.
        bias: added to the scores, after the cap.
        kept: what weights are multiplied with; 0 for those that are dropped.

    Shape:
        query: [B, N, S, D]; key, value: [B, G, T, D]; allowed, bias, kept: broadcast to
        [B, N, S, T]; sinks: [N]. Returns [B, N, S, D].
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if allowed is None:
        allowed = causal_mask(query.shape[2], key.shape[2], query.device)
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    wide = wide.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        extra = sinks.to(wide.dtype)[:, None, None].expand(*wide.shape[:3], 1)
        wide = torch.cat((wide, extra), dim=-1)
    probs = torch.softmax(wide, dim=-1).to(scores.dtype)
    probs = probs if sinks is None else probs[..., :-1]
    return (probs if kept is None else probs * kept) @ value


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """True where a query sees a key, the last query being at the last key.

    Shape:
        Returns [queries, keys].
    """
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
