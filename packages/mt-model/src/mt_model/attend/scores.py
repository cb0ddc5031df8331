"""Which scores attention makes of its queries and keys, for every way to compute it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from mt_context_parallel import AttentionDropout
from torch import Tensor

from mt_model.attend.distance import spread_in_order
from mt_model.attend.seen import seen


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """Which pairs of a query and a key count, and what becomes of their scores.

    Attributes:
        scale: what they are multiplied with.
        causal: a query sees the keys up to its own place.
        window: a query sees keys less than so many places away; None for all.
        documents: ids of packed documents that do not see each other.
        allowed: True where a query sees a key, in place of the three above, and where queries and
            keys are not the same tokens.
        bias: added to the scores after a cap: by distance, where queries and keys are the same
            tokens (`mt_model.attend.distance.bias_by_distance`), else pair by pair.
        softcap: scores become `softcap * tanh(score / softcap)`; None leaves them.
        sinks: a logit per query head that has no value.
        dropout: of the weights.
        kept: what weights are multiplied with, in place of `dropout`; 0 for those dropped.

    Shape:
        documents: [B, S]; bias: [N, 2 * S - 1], or as allowed; allowed: broadcast to [B, N, S, T];
        sinks: [N]; kept: [B, N, S, T].
    """

    scale: float
    causal: bool = True
    window: int | None = None
    documents: Tensor | None = None
    allowed: Tensor | None = None
    softcap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    dropout: AttentionDropout | None = None
    kept: Tensor | None = None

    @property
    def form(self) -> tuple[bool, ...]:
        """What is there of all this, on which the kernels that may serve depend."""
        return (
            self.window is None,
            self.documents is None,
            self.allowed is None,
            self.softcap is None,
            self.bias is None,
            self.sinks is None,
            self.dropout is None,
            self.kept is None,
        )

    @property
    def drops(self) -> bool:
        """Whether weights are dropped."""
        return self.dropout is not None or self.kept is not None

    @property
    def is_plain(self) -> bool:
        """Whether all pairs count, or the causal ones."""
        return self.window is None and self.documents is None and self.allowed is None

    def mask(self, query: Tensor) -> Tensor | None:
        """True where a query sees a key; None where all do. Broadcasts to [B, N, S, T]."""
        if self.allowed is not None:
            return self.allowed
        places = torch.arange(query.shape[1], device=query.device)
        allowed = seen(places, places, self.window, causal=self.causal)
        if self.documents is not None:
            same = self.documents[:, :, None] == self.documents[:, None, :]
            return (allowed & same)[:, None]
        return None if self.window is None and not self.causal else allowed

    def pairs(self) -> Tensor | None:
        """The bias of each pair; None for none. Broadcasts to [B, N, S, T]."""
        if self.bias is None or self.allowed is not None:
            return self.bias
        places = range(self.bias.shape[1] // 2 + 1)
        return spread_in_order(self.bias, places, places)
