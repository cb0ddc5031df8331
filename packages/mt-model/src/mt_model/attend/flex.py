"""torch's flex attention: any mask, soft caps and sinks, fused on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from mt_kernels import flex_attention as flex_with_sums
from torch import Tensor

from mt_model.attend.scores import Scores

Sees: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of indices of sample, head, query and key: whether the query sees the key."""


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, *, fused: bool = True
) -> Tensor:
    """Softmax attention by `torch.nn.attention.flex_attention`.

    A sink changes each query's weights by one factor, `sigmoid(log_sum_exp - sink)`. Blocks without
    any pair that counts are not computed.

    Args:
        query: Queries, normed and rotated.
        key: Keys, likewise; query heads share them.
        value: Values of the keys.
        scores: Scale, mask and sinks; without a bias or dropout.
        fused: Compile it, once for each size. False makes all scores, on any device; torch has no
            backward for it on a CPU.

    Shape:
        query: [B, S, N, D]; key: [B, T, G, D]; value: [B, T, G, V]. Returns [B, S, N, V].
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    mask, sees, sinks = None, _sees(scores), scores.sinks
    if sees is not None:
        from torch.nn.attention.flex_attention import create_block_mask

        mask = create_block_mask(
            sees, q.shape[0], None, q.shape[2], k.shape[2], device=str(q.device)
        )
    backend = "inductor" if fused else None
    out, lse = flex_with_sums(q, k, v, mask, scores.scale, scores.softcap, backend=backend)
    if sinks is not None:
        share = torch.sigmoid(lse - sinks.to(lse.dtype)[None, :, None])
        out = (out * share[..., None]).to(query.dtype)
    return out.transpose(1, 2)


def _sees(scores: Scores) -> Sees | None:
    """Return the mask as a function of indices; None where all pairs count."""
    allowed, documents = scores.allowed, scores.documents
    if allowed is not None:
        while allowed.dim() < 4:
            allowed = allowed[None]
        rows, heads = allowed.shape[0] > 1, allowed.shape[1] > 1
        return lambda b, h, q, k: allowed[b if rows else 0, h if heads else 0, q, k]
    if scores.is_plain and not scores.causal:
        return None

    def sees(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del head
        distance = query - key if scores.causal else (query - key).abs()
        near = distance >= 0
        if scores.window is not None:
            near = near & (distance < scores.window)
        if documents is not None:
            near = near & (documents[sample, query] == documents[sample, key])
        return near

    return sees
