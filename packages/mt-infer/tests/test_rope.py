"""Generation by models whose rotary factors depend on the length."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from mt_infer import Generator, Sampling
from mt_model import GPT, DynamicScaling, LongropeScaling, RopeConfig, RopeScaling, gpt

LONGROPE = LongropeScaling(
    short_factor=(1.0, 1.5), long_factor=(3.0, 9.0), original_length=9, factor=4.0
)
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_layers": 2, "num_heads": 4}


def greedy(model: GPT, prompt: list[int], count: int) -> list[int]:
    """Without a cache: the whole sequence again for each token."""
    tokens = torch.tensor([prompt])
    for _ in range(count):
        tokens = torch.cat((tokens, model.logits(tokens)[:, -1:].argmax(-1)), 1)
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "scaling", [None, LONGROPE, DynamicScaling(factor=2.0, original_length=32)]
)
@pytest.mark.parametrize("prompt", [[5], list(range(8)), list(range(9)), list(range(10))])
def test_greedy_tokens_are_those_without_a_cache(
    scaling: RopeScaling | None, prompt: list[int]
) -> None:
    rope = RopeConfig(theta=20.0, scaling=scaling)
    config = gpt(**SIZES, max_sequence_length=32, init_std=0.5, rope=rope)
    model = GPT(config, dtype=torch.float64, seed=1).eval()
    tokenizer = cast("Any", SimpleNamespace(vocab_size=64, eod_id=-1))
    generator = Generator(model=model, config=config, tokenizer=tokenizer)
    found = list(generator.tokens(prompt, 16, Sampling(temperature=0)))
    assert found == greedy(model, prompt, 16)
