"""Changes of a request's scores before the choice of a token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from mt_infer.sampling import Sampling

_NEVER = float("-inf")


def adjust(
    scores: Tensor,
    sampling: Sampling,
    prompt: Sequence[int],
    continuation: Sequence[int],
    ends: Collection[int] = (),
    bad: Sequence[Sequence[int]] = (),
    allowed: Tensor | None = None,
) -> Tensor:
    """Return the scores of the next token, changed by the parameters; see `Sampling`.

    Args:
        scores: Scores of the vocabulary.
        sampling: Parameters.
        prompt: Tokens of the prompt.
        continuation: Tokens after the prompt.
        ends: Tokens that end the continuation.
        bad: Lists of tokens that the continuation must not have.
        allowed: Whether the grammar allows each token; None without one.

    Shape:
        scores: [vocab]; allowed: [vocab]. Returns [vocab].
    """
    scores = scores.clone()
    if allowed is not None:
        scores.masked_fill_(~allowed.to(scores.device), _NEVER)
    if sampling.allowed_token_ids:
        ids = _ids(scores, sampling.allowed_token_ids)
        scores = torch.full_like(scores, _NEVER).index_copy_(0, ids, scores[ids])
    _set(scores, [word[-1] for word in bad if _ends_with(continuation, word[:-1])])
    counts = Counter(continuation)
    if sampling.repetition_penalty != 1:
        factor = sampling.repetition_penalty
        seen = {each for each in (*prompt, *counts) if each < len(scores)}  # padding has none
        _change(scores, seen, lambda x: torch.where(x > 0, x / factor, x * factor))
    if counts and (sampling.frequency_penalty or sampling.presence_penalty):
        times = scores.new_tensor(list(counts.values()))
        less = sampling.frequency_penalty * times + sampling.presence_penalty
        _change(scores, counts, lambda x: x - less)
    if sampling.logit_bias:
        bias = scores.new_tensor(list(sampling.logit_bias.values()))
        _change(scores, sampling.logit_bias, lambda x: x + bias)
    if len(continuation) < sampling.min_tokens:
        _set(scores, ends)
    return scores


def _ids(scores: Tensor, ids: Collection[int]) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int64, device=scores.device)


def _change(scores: Tensor, ids: Collection[int], change: Callable[[Tensor], Tensor]) -> None:
    where = _ids(scores, ids)
    scores[where] = change(scores[where])


def _set(scores: Tensor, ids: Collection[int]) -> None:
    known = [each for each in ids if 0 <= each < len(scores)]
    if known:
        scores[_ids(scores, known)] = _NEVER


def _ends_with(tokens: Sequence[int], end: Sequence[int]) -> bool:
    return not end or list(tokens[-len(end) :]) == list(end)
