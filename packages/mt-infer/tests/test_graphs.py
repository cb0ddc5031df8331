"""Tokens behind the prompt as replays of one graph: the same with and without."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from mt_infer import Generator, Sampling
from mt_model import GPT, AlibiConfig, LongropeScaling, RopeConfig, gpt
from mt_parallel_state import ParallelLayout, ParallelState
from mt_schedule import split_layers

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


def two_ranks(sampling: Sampling, pp: int, *, cuda_graphs: bool) -> list[int]:
    config = gpt(**SIZES, max_sequence_length=32, init_std=0.5)
    with ParallelState(ParallelLayout(tp=2 // pp, pp=pp)) as state:
        layers = split_layers(2, pp)[state.index("pp")]
        model = GPT(config, state, layers=layers, seed=1).eval()
        stages = state.group("pp")
        return tokens(model, sampling, stages=stages, cuda_graphs=cuda_graphs)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(top_k=20, seed=2)])
def test_two_ranks_give_the_same_tokens_with_graphs(ranks, sampling, pp) -> None:
    config = gpt(**SIZES, max_sequence_length=32, init_std=0.5)
    expected = tokens(GPT(config, seed=1).eval(), sampling)
    for cuda_graphs in (False, True):
        for found in ranks(2, partial(two_ranks, sampling, pp, cuda_graphs=cuda_graphs)):
            assert found == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_pass_chooses_the_tokens_of_eager_mode() -> None:
    model = GPT(gpt(**SIZES, max_sequence_length=32, init_std=0.5), seed=1).cuda().eval()
    for sampling in (Sampling(temperature=0), Sampling(top_k=20, top_p=0.9, seed=2)):
        assert tokens(model, sampling, cuda_graphs=True) == tokens(model, sampling)


def test_the_command_takes_graphs(saved_run, generate) -> None:
    options = ("--max-tokens", 8, "--seed", 3)
    plain = generate(saved_run, *options)
    assert plain[0] == 0
    assert generate(saved_run, *options, "--cuda-graphs") == plain


def test_processes_are_told_of_graphs(saved_run, generate, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr("mt_parallel_state.launch", lambda *call: calls.append(call) or 0)
    generate(saved_run, "--nproc", 2, "--cuda-graphs")
    assert "--cuda-graphs" in calls[0][1]
