"""The largest attention score of a step, for QK-clip."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from mt_parallel_state import all_gather
from torch import Tensor

from mt_model.attend.seen import seen
from mt_model.attend.sequence import SequenceAttend

_BLOCK = 512  # queries whose scores are there at a time


@runtime_checkable
class ClippedMixer(Protocol):
    """A mixer whose attention scores can be bounded by scaling its weights.

    Attributes:
        index: Layer index in the whole model.
        can_clip: Whether the weights scale the scores; norms of queries and keys prevent it.
        max_logits: Largest scores since the last reset to -inf; None if they are not watched.
    """

    index: int
    can_clip: bool
    max_logits: Tensor | None

    def watch_logits(self) -> None:
        """Keep the largest scores in training from here on."""
        ...

    def logit_factors(self, query: Tensor, key: Tensor) -> dict[str, Tensor]:
        """Return factors of the parameters that scale queries and keys as given."""
        ...


@torch.no_grad()
def max_logit(
    query: Tensor,
    key: Tensor,
    *,
    context: SequenceAttend,
    scale: float | None = None,
    window: int | None = None,
    causal: bool = True,
    documents: Tensor | None = None,
) -> Tensor:
    """Return the largest score of this rank's queries, by key head.

    Scores are scaled, before a soft cap and before dropout. They are computed for a block of
    queries at a time and not kept, at the cost of one of attention's two products. Where ranks
    share a sequence the keys are all-gathered; the caller takes the maximum over their queries.

    Args:
        query: Queries, normed and rotated as in attention.
        key: Keys, likewise.
        context: Ranks that share the sequences.
        scale: Scale of the scores; 1 / sqrt(D) where None.
        window: Number of tokens that a query sees on a side, or None for all.
        causal: Whether a query sees only the tokens up to its own.
        documents: Ids of packed documents that do not see each other.

    Shape:
        query: [B, S, G * Q, D]; key: [B, S, G, D]; documents: [B, whole S]. Returns fp32 (fp64 for
        fp64) [G].
    """
    factor: float = query.shape[-1] ** -0.5 if scale is None else scale
    query_BSGQD = query.unflatten(2, (key.shape[2], -1))
    own = context.positions(query.shape[1] * context.size, query.device)
    places = all_gather(own, context.group, dim=0)
    keys = all_gather(key.contiguous(), context.group, dim=1)
    best = key.new_full((key.shape[2],), float("-inf"))
    for start in range(0, query.shape[1], _BLOCK):
        block, rows = query_BSGQD[:, start : start + _BLOCK], own[start : start + _BLOCK]
        scores_BGQST = torch.einsum("bsgqd,btgd->bgqst", block, keys)
        hidden = ~seen(rows, places, window, causal=causal)
        if documents is not None:
            hidden = hidden | (documents[:, rows, None] != documents[:, None, places])
            hidden = hidden[:, None, None]
        scores_BGQST.masked_fill_(hidden, float("-inf"))
        best = torch.maximum(best, scores_BGQST.amax((0, 2, 3, 4)))
    return best.to(torch.promote_types(best.dtype, torch.float32)) * factor
