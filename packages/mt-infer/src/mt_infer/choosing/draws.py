"""The choice of tokens, a function of the scores, the seed, the position and the choice number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from mt_files import UserError
from mt_parallel_state import hash_key, random_uniform
from torch import Tensor

from mt_infer.sampling import Sampling

NO_TOKEN = -1
"""Stands for the token of a row of scores from which none can be chosen."""

_LOWEST, _BUCKETS = 100.0, 4096  # scores below the largest one by more share the last bucket
_FEW = 64  # a draw rarely falls outside this number of most likely tokens


class LogitsError(UserError):
    """A row of scores from which no token can be chosen."""


def no_token_error(position: int, problem: str = "") -> LogitsError:
    """Return the error for a position of a text at which no token can be chosen.

    Args:
        position: Index of the token in the text, including the prompt.
        problem: Problem of the text's grammar, if the grammar is the reason.
    """
    if problem:
        return LogitsError(
            f"the grammar has no token {position} of the text (the prompt's included): {problem}; "
            "use another grammar, or allow more tokens"
        )
    return LogitsError(
        f"the model's scores for token {position} of the text (the prompt's included) have NaN or "
        "no finite maximum, so no token can be chosen; the weights are damaged, or too large for "
        "this dtype (try --dtype fp32, or another checkpoint), or allowed_token_ids, bad_words and "
        "a grammar leave no token"
    )


def draw_key(seed: int, position: int) -> int:
    """Return the key of the random numbers that choose the token at a position."""
    return hash_key("mt-infer", seed, position)


def uniform(seeds: Sequence[int], positions: Sequence[int], choices: Sequence[int]) -> Tensor:
    """Return the random number of each row, a function of its seed, position and choice alone.

    Shape:
        Returns [R], fp64 in [0, 1).
    """
    pairs = zip(seeds, positions, strict=True)
    keys = torch.tensor([draw_key(seed, position) for seed, position in pairs])
    return random_uniform(keys, torch.tensor(choices), dtype=torch.float64)


def choose(logits: Tensor, sampling: Sampling, position: int | Sequence[int]) -> Tensor:
    """Choose one token per row.

    The random number is a function of the seed and the position, so ranks with the same logits
    choose the same token without communication. Penalties, which need a text, are not applied.

    Args:
        logits: Unnormalised scores of the whole vocabulary.
        sampling: Parameters of the choice; without a seed its seed is 0.
        position: Index of the chosen token in its sequence, for all rows or for each.

    Shape:
        logits `[B, vocab]`; returns `[B]`, int64.

    Raises:
        LogitsError: A row has NaN, or no finite maximum.
    """
    if not isinstance(logits, Tensor) or logits.dim() != 2 or not logits.shape[1]:
        raise TypeError(f"logits must be a tensor of shape [B, vocab], not {_kind(logits)}")
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling must be a Sampling, not {_kind(sampling)}")
    rows = logits.shape[0]
    positions = [position] * rows if isinstance(position, int) else position
    tokens = draw(logits, sampling, uniform([sampling.seed or 0] * rows, positions, [0] * rows))
    for row, token in enumerate(tokens.tolist()):
        if token == NO_TOKEN:
            raise LogitsError(
                f"row {row} of the logits has NaN or no finite maximum (its largest value is "
                f"{float(logits[row].amax())}), so no token can be chosen; check the weights"
            )
    return tokens


def choose_rows(logits: Tensor, samplings: Sequence[Sampling], draws: Tensor) -> Tensor:
    """Choose one token per row, each by its own parameters.

    Shape:
        logits: [R, vocab]; draws: [R]. Returns [R], with `NO_TOKEN` where none can be chosen.
    """
    groups: dict[tuple[float, ...], list[int]] = defaultdict(list)
    for row, sampling in enumerate(samplings):
        groups[sampling.kept if sampling.temperature else ()].append(row)
    draws = draws.to(logits.device)
    if len(groups) == 1:
        return draw(logits, samplings[0], draws)
    tokens = torch.empty(len(samplings), dtype=torch.int64, device=logits.device)
    for own in groups.values():
        rows = torch.tensor(own, device=logits.device)
        tokens[rows] = draw(logits[rows], samplings[own[0]], draws[rows])
    return tokens


def draw(logits: Tensor, sampling: Sampling, draws: Tensor, *, quick: bool = True) -> Tensor:
    """Choose one token per row with its random number.

    A row with NaN or without a finite maximum gives `NO_TOKEN`: a raise would wait for the device.

    Args:
        logits: Scores.
        sampling: Parameters of the choice.
        draws: Random numbers in [0, 1).
        quick: Whether to look at the most likely tokens first, and sort the others only if the
            draw needs them; not possible in a CUDA graph.

    Shape:
        logits: [R, vocab]; draws: [R]. Returns [R].
    """
    largest, best = logits.max(-1)
    is_usable = largest.isfinite()
    if sampling.temperature == 0:
        return best.masked_fill(~is_usable, NO_TOKEN)
    # The largest score becomes 0, so no temperature makes it infinite.
    scores = (logits.double() - largest[:, None].double()) / sampling.temperature
    if not quick or sampling.typical_p < 1 or scores.shape[1] <= 2 * _FEW:
        chosen = _from_all(scores, sampling, draws)
    else:
        chosen, is_sure = _from_few(scores, sampling, draws)
        is_sure |= ~is_usable
        if not is_sure.all():
            rest = (~is_sure).nonzero().flatten()
            # On a GPU the masses of buckets would be summed in any order.
            is_plain = sampling.top_k == 0 and sampling.min_p == 0 and not scores.is_cuda
            others = _from_buckets if is_plain else _from_all
            chosen[rest] = others(scores[rest], sampling, draws[rest])
    return chosen.masked_fill(~is_usable, NO_TOKEN)


def _from_all(scores: Tensor, sampling: Sampling, draws: Tensor) -> Tensor:
    """Draw from all tokens, ordered from the most likely, and equal ones by id."""
    scores, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    if 0 < sampling.top_k < scores.shape[-1]:
        smallest = scores[..., sampling.top_k - 1 : sampling.top_k]
        scores = scores.masked_fill(scores < smallest, float("-inf"))
    probabilities = _filtered(scores.softmax(-1), sampling)
    if sampling.typical_p < 1:
        probabilities = _typical(probabilities, sampling.typical_p)
    cumulative = probabilities.cumsum(-1)
    return _at(draws * cumulative[:, -1], cumulative, probabilities, order)


def _from_few(scores: Tensor, sampling: Sampling, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from the most likely tokens, and return for which rows this draw is certain."""
    values, order = scores.topk(_FEW, dim=-1)
    order, by_id = order.sort(dim=-1)
    values, by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, by_value)
    is_clear = values > values[:, -1:]  # others may tie with the last
    is_whole = torch.ones_like(is_clear[:, 0])
    if sampling.top_k > 0:
        dropped = values < values[:, min(sampling.top_k, _FEW) - 1, None]
        is_whole = (dropped & is_clear).any(-1)  # else others may be kept, too
        probabilities = values.masked_fill(dropped, float("-inf")).softmax(-1)
    else:
        probabilities = scores.softmax(-1).gather(-1, order)
    kept = _filtered(probabilities, sampling)
    cumulative = kept.cumsum(-1)
    total = cumulative[:, -1]
    if sampling.kept[1:4] == (0, 1.0, 0.0):
        total = torch.ones_like(total)
    else:
        is_whole &= ((kept == 0) & is_clear).any(-1)
    target = draws * total
    is_inside = target < cumulative.masked_fill(~is_clear, 0.0).amax(-1)
    return _at(target, cumulative, kept, order), is_whole & is_inside


def _from_buckets(scores: Tensor, sampling: Sampling, draws: Tensor) -> Tensor:
    """Draw like `_from_all` by temperature and top-p, but sort the tokens of only two buckets."""
    probabilities = scores.softmax(-1)
    buckets = (scores.clamp(min=-_LOWEST) * -(_BUCKETS / _LOWEST)).long()
    found = [
        _from_row(row, probabilities[index], buckets[index], sampling.top_p, float(draws[index]))
        for index, row in enumerate(scores)
    ]
    return torch.tensor(found)


def _from_row(
    scores: Tensor, probabilities: Tensor, buckets: Tensor, top_p: float, number: float
) -> int:
    """Draw a token from a row whose buckets have the larger scores first."""
    mass = torch.bincount(buckets, weights=probabilities, minlength=_BUCKETS + 1).cumsum(0)

    def around(target: float, *, right: bool) -> tuple[Tensor, Tensor, int]:
        """Return the tokens of the target's bucket in order, their mass, and its place there."""
        bucket = int(torch.searchsorted(mass, target, right=right).clamp(max=_BUCKETS))
        ids = (buckets == bucket).nonzero().flatten()
        ids = ids[scores[ids].argsort(descending=True, stable=True)]
        before = mass[bucket - 1] if bucket else 0.0
        cumulative = before + probabilities[ids].cumsum(0)
        return ids, cumulative, int(torch.searchsorted(cumulative, target, right=right))

    total = 1.0
    if top_p < 1:
        _, cumulative, place = around(top_p, right=False)
        total = float(cumulative[min(place, len(cumulative) - 1)])
    ids, _, place = around(number * total, right=True)
    return int(ids[min(place, len(ids) - 1)])


def _filtered(probabilities: Tensor, sampling: Sampling) -> Tensor:
    """Return sorted probabilities with zeros for tokens that top-p and min-p drop."""
    if sampling.top_p < 1:
        # The token that crosses p stays, so the mass before each token decides.
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    if sampling.min_p > 0:
        smallest = sampling.min_p * probabilities[:, :1]
        probabilities = probabilities.masked_fill(probabilities < smallest, 0.0)
    return probabilities


def _typical(probabilities: Tensor, p: float) -> Tensor:
    """Return probabilities with zeros for the tokens that typical sampling drops."""
    probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    information = -probabilities.log()
    entropy = torch.special.entr(probabilities).sum(-1, keepdim=True)
    order = torch.argsort((information - entropy).abs(), dim=-1, stable=True)
    ordered = probabilities.gather(-1, order)
    dropped = ordered.cumsum(-1) - ordered >= p
    return probabilities.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), 0.0)


def _at(target: Tensor, cumulative: Tensor, probabilities: Tensor, order: Tensor) -> Tensor:
    """Return the token of each row whose interval of the cumulative mass has the target."""
    index = torch.searchsorted(cumulative, target[:, None], right=True)
    # A target that rounds up to the total would fall after the last kept token.
    places = torch.arange(1, probabilities.shape[-1] + 1, device=order.device)
    last = (places * (probabilities > 0)).amax(-1, keepdim=True) - 1
    return order.gather(-1, index.minimum(last).clamp(min=0)).squeeze(-1)


def _kind(value: object) -> str:
    return f"of {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
