"""Tokens behind the prompt as replays of one graph: the same with and without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from mt_infer import Generator, Sampling
from mt_model import GPT, AlibiConfig, LongropeScaling, RopeConfig, gpt

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "num_layers": 2, "num_heads": 4}
LONGROPE = LongropeScaling(
    short_factor=(1.0, 1.5), long_factor=(3.0, 9.0), original_length=9, factor=4.0
)


def tokens(model: GPT, sampling: Sampling, **how: Any) -> list[int]:
    tokenizer = cast("Any", SimpleNamespace(vocab_size=60, eod_id=-1))
    generator = Generator(model=model, config=model.config, tokenizer=tokenizer, **how)
    return list(generator.tokens([5, 9, 3], 20, sampling))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0),
        Sampling(seed=1),
        Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=2),
    ],
)
@pytest.mark.parametrize("scaling", [None, LONGROPE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_the_same_with_graphs(sampling, scaling, dtype) -> None:
    rope = RopeConfig(theta=20.0, scaling=scaling)
    config = gpt(**SIZES, max_sequence_length=32, init_std=0.5, rope=rope)
    model = GPT(config, dtype=dtype, seed=1).eval()
    expected = tokens(model, sampling)
    assert tokens(model, sampling, cuda_graphs=True) == expected
    assert len(set(expected)) > 3


def test_what_no_graph_serves_says_so_and_gives_the_same_tokens() -> None:
    config = gpt(**SIZES, max_sequence_length=32, positions="none", score_bias=AlibiConfig())
    model, said = GPT(config, seed=1).eval(), []
    sampling = Sampling(seed=4)
    found = tokens(model, sampling, cuda_graphs=True, on_eager=said.append)
    assert found == tokens(model, sampling)
    assert len(said) == 1
    assert "makes a tensor of Python's values" in said[0]


def test_the_command_takes_graphs(saved_run, generate) -> None:
    options = ("--max-tokens", 8, "--seed", 3)
    plain = generate(saved_run, *options)
    assert plain[0] == 0
    assert generate(saved_run, *options, "--cuda-graphs") == plain
