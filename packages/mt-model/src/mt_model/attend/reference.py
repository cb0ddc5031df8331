"""Softmax attention in plain operations, the reference of the fast kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from mt_model.attend.scores import Scores


def reference_attention(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Softmax attention in plain operations.

    Args:
        query: Queries, normed and rotated.
        key: Keys, likewise; each serves `N // G` consecutive query heads.
        value: Values of the keys.
        scores: Scale, mask, bias and sinks; without dropout by global index.

    Shape:
        query: [B, S, N, D]; key: [B, T, G, D]; value: [B, T, G, V]. Returns [B, S, N, V].
    """
    repeats, sinks = query.shape[2] // key.shape[2], scores.sinks
    k, v = (x.repeat_interleave(repeats, 2).transpose(1, 2) for x in (key, value))
    found = query.transpose(1, 2) @ k.mT * scores.scale
    if scores.softcap is not None:
        found = scores.softcap * torch.tanh(found / scores.softcap)
    bias, allowed = scores.pairs(), scores.mask(query)
    if bias is not None:
        found = found + bias
    wide = found.to(torch.promote_types(found.dtype, torch.float32))
    if allowed is not None:
        wide = wide.masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        extra = sinks.to(wide.dtype)[:, None, None].expand(*wide.shape[:3], 1)
        wide = torch.cat((wide, extra), dim=-1)
    probs = torch.softmax(wide, dim=-1).to(found.dtype)
    probs = probs if sinks is None else probs[..., :-1]
    return ((probs if scores.kept is None else probs * scores.kept) @ v).transpose(1, 2)
