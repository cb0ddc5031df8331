"""The scores of attention: scale, mask, bias, cap, sinks and dropout, for every kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from mt_context_parallel import AttentionDropout
from torch import Tensor

from mt_model.attend.distance import spread_in_order
from mt_model.attend.seen import seen


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """The pairs of queries and keys that count, and the operations on their scores.

    Attributes:
        scale: Factor of the scores.
        causal: A query sees the keys up to its own place.
        window: A query sees keys less than `window` places away; None for all.
        documents: Ids of packed documents that do not see each other.
        allowed: Mask, True where a query sees a key, in place of the three fields above; needed
            where queries and keys are different tokens.
        bias: Bias of the scores after a cap: by distance, where queries and keys are the same
            tokens (`mt_model.attend.distance.bias_by_distance`), else pair by pair.
        softcap: Scores become `softcap * tanh(score / softcap)`; None leaves them.
        sinks: A logit per query head without a value.
        dropout: Dropout of the weights.
        kept: Factors of the weights in place of `dropout`; 0 drops a weight.

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
        """The features in use, on which the choice of a kernel depends."""
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
        """Return a mask, True for visible keys; None for all. Broadcasts to [B, N, S, T]."""
        if self.allowed is not None:
            return self.allowed
        places = torch.arange(query.shape[1], device=query.device)
        allowed = seen(places, places, self.window, causal=self.causal)
        if self.documents is not None:
            same = self.documents[:, :, None] == self.documents[:, None, :]
            return (allowed & same)[:, None]
        return None if self.window is None and not self.causal else allowed

    def pairs(self) -> Tensor | None:
        """Return the bias of each pair; None for none. Broadcasts to [B, N, S, T]."""
        if self.bias is None or self.allowed is not None:
            return self.bias
        places = range(self.bias.shape[1] // 2 + 1)
        return spread_in_order(self.bias, places, places)
