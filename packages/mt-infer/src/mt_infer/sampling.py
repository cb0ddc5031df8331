"""Choose the next token from logits: greedy, temperature, top-k, top-p, reproducible by seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from mt_files import Checks, UserError
from mt_parallel_state import hash_key, random_uniform
from torch import Tensor

NO_TOKEN = -1
"""Stands for the token of a row of logits from which none can be chosen."""


class LogitsError(UserError):
    """A row of logits from which no token can be chosen."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Parameters of the choice of tokens.

    Attributes:
        temperature: Divisor of the logits; 0 is greedy.
        top_k: Number of most likely tokens to keep (and ties with the last); None keeps all.
        top_p: Keep the smallest set of most likely tokens whose probability reaches p.
        seed: The same seed gives the same text, on any number of ranks.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        Checks(self).done()
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature {self.temperature}: use 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k {self.top_k}: use 1 or more, or leave it out")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: use a number above 0 and at most 1")

    def key(self, position: int) -> int:
        """Return the key of the random number that chooses the token at a position."""
        return hash_key("mt-infer", self.seed, position)


def choose(logits: Tensor, sampling: Sampling, position: int) -> Tensor:
    """Choose one token per row.

    The random number is a function of the seed, the position and the row, so ranks with the same
    logits choose the same token without communication.

    Args:
        logits: Unnormalised scores of the whole vocabulary.
        sampling: Parameters of the choice.
        position: Index of the chosen token in its sequence.

    Shape:
        logits `[B, vocab]`; returns `[B]`, int64.

    Raises:
        LogitsError: A row has NaN, or no finite maximum.
    """
    if not isinstance(logits, Tensor) or logits.dim() != 2 or not logits.shape[1]:
        raise TypeError(f"logits must be a tensor of shape [B, vocab], not {_kind(logits)}")
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling must be a Sampling, not {_kind(sampling)}")
    tokens = choose_by(sampling.key(position), logits, sampling)
    for row, token in enumerate(tokens.tolist()):
        if token == NO_TOKEN:
            raise LogitsError(
                f"row {row} of the logits has NaN or no finite maximum (its largest value is "
                f"{float(logits[row].amax())}), so no token can be chosen; check the weights"
            )
    return tokens


def choose_by(key: int | Tensor, logits: Tensor, sampling: Sampling) -> Tensor:
    """Choose one token per row with the random number of a key, which may be a tensor.

    A row with NaN or without a finite maximum gives `NO_TOKEN`: a raise would wait for the device,
    and can't be captured in a graph.
    """
    largest, best = logits.max(-1)
    is_usable = largest.isfinite()
    if sampling.temperature == 0:
        return best.masked_fill(~is_usable, NO_TOKEN)
    scores = logits.double()
    # The largest score becomes 0, so no temperature makes it infinite.
    scores = (scores - largest[:, None].double()) / sampling.temperature
    scores, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        smallest = scores[..., sampling.top_k - 1 : sampling.top_k]
        scores = scores.masked_fill(scores < smallest, float("-inf"))
    probabilities = scores.softmax(-1)
    if sampling.top_p is not None:
        # The token that crosses p stays, so the mass before each token decides.
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    cumulative = probabilities.cumsum(-1)
    rows = torch.arange(logits.shape[0], device=logits.device)
    draw = random_uniform(key, rows, dtype=torch.float64)[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, draw, right=True)
    # A draw that rounds up to the total would fall after the last kept token.
    last = (probabilities > 0).sum(-1, keepdim=True) - 1
    chosen = order.gather(-1, index.minimum(last).clamp(min=0)).squeeze(-1)
    return chosen.masked_fill(~is_usable, NO_TOKEN)


def _kind(value: object) -> str:
    return f"of {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
