"""Tokens of passes with guesses are distributed as the model's probabilities say."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from math import sqrt

import pytest
import torch
from mt_infer import Engine, EngineOptions, Sampling
from mt_model import GPT, gpt

VOCAB, NEW, PROMPT = 3, 4, [1, 2, 0]


def probabilities(model: GPT, temperature: float) -> dict[tuple[int, ...], float]:
    """The probability of every continuation, by the model's forward."""
    texts = list(product(range(VOCAB), repeat=NEW))
    rows = torch.tensor([[*PROMPT, *text] for text in texts])
    logits = model.logits(rows)[:, len(PROMPT) - 1 : -1].detach().double()
    each = (logits / temperature).log_softmax(-1).gather(2, rows[:, len(PROMPT) :, None])
    return dict(zip(texts, each.sum((1, 2)).exp().tolist(), strict=True))


def bound(freedom: int, deviations: float) -> float:
    """The chi-square that a sample exceeds as rarely as a normal one its deviations."""
    return freedom * (1 - 2 / (9 * freedom) + deviations * sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize(
    "number", [4_000, pytest.param(200_000, marks=[pytest.mark.campaign])], ids=["few", "many"]
)
def test_guesses_do_not_change_the_distribution(number, monkeypatch) -> None:
    sizes = {"hidden_size": 8, "num_layers": 1, "num_heads": 1, "max_sequence_length": 8}
    model = GPT(gpt(vocab_size=VOCAB, init_std=0.12, **sizes), seed=1).eval()
    rng = random.Random(1)

    def guess(tokens: list[int], most: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(most)]

    monkeypatch.setattr("mt_infer.engine.drafts.ngram_drafts", guess)
    options = EngineOptions(
        blocks=200, block_size=8, speculate="ngram", batch_invariant=False, prefix_cache=False
    )
    made, seen, seed = Engine(model, options=options), Counter(), 0
    while made.stats()["drafted"] < number:
        asked = [Sampling(seed=seed + row, temperature=1.5, max_tokens=NEW) for row in range(200)]
        found = made.generate([PROMPT] * 200, asked)
        seen.update(tuple(each.tokens) for each in found)
        seed += 200
    expected = probabilities(model, 1.5)
    assert min(expected.values()) * seed > 4
    assert max(expected.values()) > 5 * min(expected.values())
    distance = sum((seen[text] - seed * p) ** 2 / (seed * p) for text, p in expected.items())
    assert distance < bound(len(expected) - 1, 3.7)
    accepted = made.stats()["accepted"] / made.stats()["drafted"]
    assert 0.2 < accepted < 0.5
