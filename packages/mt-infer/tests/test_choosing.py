"""Each step of choosing against a plain one, on drawn scores."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from mt_infer import Sampling
from mt_infer.choosing.draws import choose_rows, draw, uniform
from mt_infer.choosing.processors import adjust

CASES = pytest.mark.parametrize("cases", [300, pytest.param(10_000, marks=pytest.mark.campaign)])


def plain_adjust(
    scores: list[float],
    how: Sampling,
    prompt: list[int],
    after: list[int],
    ends: set[int],
    bad: Any,
    by_grammar: Any,
) -> list[float]:
    found = []
    for token, score in enumerate(scores):
        if by_grammar is not None and not by_grammar[token]:
            score = -math.inf
        if how.allowed_token_ids and token not in how.allowed_token_ids:
            score = -math.inf
        for word in bad:
            if [*after, token][-len(word) :] == list(word):
                score = -math.inf
        if token in prompt or token in after:
            score = score / how.repetition_penalty if score > 0 else score * how.repetition_penalty
        times = after.count(token)
        score -= times * how.frequency_penalty + (how.presence_penalty if times else 0)
        score += how.logit_bias.get(token, 0)
        if token in ends and len(after) < how.min_tokens:
            score = -math.inf
        found.append(score)
    return found


def drawn_sampling(rng: random.Random, vocab: int) -> dict[str, Any]:
    def maybe(value: Any, neutral: Any) -> Any:
        return value if rng.random() < 0.4 else neutral

    ids = rng.sample(range(vocab), vocab // 2)
    return {
        "allowed_token_ids": maybe(ids, ()),
        "repetition_penalty": maybe(rng.uniform(0.5, 2), 1.0),
        "frequency_penalty": maybe(rng.uniform(-1, 1), 0.0),
        "presence_penalty": maybe(rng.uniform(-1, 1), 0.0),
        "logit_bias": maybe({each: rng.uniform(-5, 5) for each in ids[:3]}, {}),
        "min_tokens": maybe(rng.randint(0, 6), 0),
    }


@CASES
def test_scores_are_adjusted_as_by_a_plain_loop(cases) -> None:
    rng = random.Random(1)
    for _ in range(cases):
        vocab = rng.randint(4, 12)
        scores = [rng.choice([-math.inf, rng.gauss(0, 3), rng.gauss(0, 3)]) for _ in range(vocab)]
        prompt, after = ([rng.randrange(vocab) for _ in range(rng.randint(0, 6))] for _ in range(2))
        ends = {*rng.sample(range(vocab), 2), vocab + 3}  # an end may be of the padding
        bad = [[rng.randrange(vocab) for _ in range(rng.randint(1, 3))] for _ in range(3)]
        how = Sampling(**drawn_sampling(rng, vocab))
        given = torch.tensor(scores, dtype=torch.float64)
        by_grammar = rng.choice([None, torch.tensor([rng.random() < 0.5 for _ in scores])])
        found = adjust(given, how, prompt, after, ends, bad, by_grammar).tolist()
        assert given.tolist() == scores
        expected = plain_adjust(scores, how, prompt, after, ends, bad, by_grammar)
        assert found == pytest.approx(expected, abs=1e-12)


def plain_choice(scores: list[float], how: Sampling, u: float) -> int:
    """Choose by the definitions: keep tokens, the most likely first, and take the token at u."""
    top = max(scores)
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if how.top_k:
        smallest = scores[order[min(how.top_k, len(order)) - 1]]
        order = [token for token in order if scores[token] >= smallest]
    weights = {token: math.exp((scores[token] - top) / how.temperature) for token in order}
    total = math.fsum(weights.values())
    shares = {token: weight / total for token, weight in weights.items()}
    kept, mass = [], 0.0
    for token in order:
        if how.top_p < 1 and mass >= how.top_p:
            break
        mass += shares[token]
        if shares[token] >= how.min_p * shares[order[0]]:
            kept.append(token)
    kept = [token for token in kept if shares[token] > 0]
    if how.typical_p < 1:
        total = math.fsum(shares[token] for token in kept)
        own = {token: shares[token] / total for token in kept}
        entropy = -math.fsum(p * math.log(p) for p in own.values())
        mass, typical = 0.0, set()
        for token in sorted(kept, key=lambda token: abs(-math.log(own[token]) - entropy)):
            if mass >= how.typical_p:
                break
            typical.add(token)
            mass += own[token]
        kept = [token for token in kept if token in typical]
    target = u * math.fsum(shares[token] for token in kept)
    mass = 0.0
    for token in kept:
        mass += shares[token]
        if target < mass:
            return token
    return kept[-1]


@CASES
@pytest.mark.parametrize("vocab", [9, 400])
def test_tokens_are_drawn_as_by_a_plain_loop(cases, vocab) -> None:
    """The larger vocabulary is drawn from its most likely tokens first, and often ties."""
    rng = random.Random(2)
    for case in range(cases):
        spread, digits = rng.choice([0.3, 1, 5]), rng.choice([1, 12])
        scores = [round(rng.gauss(0, spread), digits) for _ in range(vocab)]
        how = Sampling(
            temperature=rng.choice([0.2, 1, 3]),
            top_k=rng.choice([0, 0, 1, 3, 50, 70]),
            top_p=rng.choice([1, 1, 0.1, 0.9, 0.999]),
            min_p=rng.choice([0, 0, 0.05, 0.5]),
            typical_p=rng.choice([1, 1, 0.2, 0.9]),
        )
        u = float(uniform([7], [case], [0]))
        given, draws = torch.tensor([scores], dtype=torch.float64), torch.tensor([u]).double()
        expected = plain_choice(scores, how, u)
        assert draw(given, how, draws).tolist() == [expected]
        assert draw(given, how, draws, quick=False).tolist() == [expected]


def test_rows_of_a_batch_choose_as_alone() -> None:
    rng = random.Random(3)
    logits = torch.randn(24, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    ways = [{"temperature": 0}, {}, {"top_p": 0.7}, {"top_k": 9, "min_p": 0.1}]
    samplings = [Sampling(**rng.choice(ways)) for _ in range(24)]
    draws = uniform(list(range(24)), list(range(5, 29)), [0, 1] * 12)
    together = choose_rows(logits, samplings, draws)
    for row in range(24):
        alone = choose_rows(logits[row : row + 1], [samplings[row]], draws[row : row + 1])
        assert alone.tolist() == together[row : row + 1].tolist()


def test_a_draw_is_of_its_seed_position_and_choice() -> None:
    named = [(0, 5, 0), (1, 5, 0), (0, 6, 0), (0, 5, 1)]
    seeds, positions, choices = zip(*named, strict=True)
    found = uniform(seeds, positions, choices).tolist()
    assert len(set(found)) == 4
    assert uniform([0], [5], [0]).tolist() == found[:1]
    # Texts that seeds gave before stay: this is the number of row 0 until now.
    assert found[0] == 0.12540459019562256
