"""An engine goes on from the blocks that another one computed, on whatever layout."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from mt_infer import Engine, EngineOptions, RankError, Sampling, Service
from mt_parallel_state import ParallelLayout, ParallelState
from test_engine import model_of
from test_ranks import LAYOUTS, built, requests

PROMPT = [5, 9, 3, 44, 17, 2, 60, 31, 8, 12, 7]
HOW = Sampling(seed=4, max_tokens=12, logprobs=True)
OPTIONS: dict[str, Any] = {"blocks": 60, "block_size": 4, "max_batch": 5}


def engine(name: str, **how: Any) -> Engine:
    return Engine(model_of(name), options=EngineOptions(**OPTIONS | how))


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("llama", {"kv_cache_dtype": "fp8"}),
        ("mla", {"speculate": "model"}),
        ("mamba2", {}),
        ("delta", {}),
    ],
)
def test_an_engine_goes_on_from_the_blocks_of_another(name, how) -> None:
    if "speculate" in how:
        how = {"speculate": model_of("llama")}
    first, second, alone = (engine(name, **how) for _ in range(3))
    content = first.hand_over(PROMPT)
    assert second.take_over(content) == second.take_over(content) == 8
    (found,), (expected,) = second.generate(PROMPT, HOW), alone.generate(PROMPT, HOW)
    assert found.tokens == expected.tokens
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-9)
    stats = second.stats()
    assert (stats["prefix_tokens"], stats["free_blocks"]) == (8, stats["blocks"])


def test_blocks_are_for_the_caller_of_the_hand_over() -> None:
    first, second = engine("llama"), engine("llama")
    ann = Service(caller="ann")
    second.take_over(first.hand_over(PROMPT, service=ann))
    second.generate(PROMPT, HOW)
    assert second.stats()["prefix_tokens"] == 0
    second.generate(PROMPT, HOW, service=ann)
    assert second.stats()["prefix_tokens"] == 8


def test_too_few_free_blocks_keep_the_beginning_alone() -> None:
    second = engine("llama", blocks=10)
    stream = second.stream([1] * 28, Sampling(max_tokens=10))
    next(stream)
    content = engine("llama").hand_over(PROMPT * 2)
    assert 0 < second.take_over(content) < 20
    stream.close()
    (expected,) = engine("llama").generate(PROMPT * 2, HOW)
    assert second.generate(PROMPT * 2, HOW)[0].tokens == expected.tokens


@pytest.mark.parametrize("other", [{"block_size": 8}, {"kv_cache_dtype": "int8"}])
def test_blocks_of_another_kind_of_engine_are_refused(other) -> None:
    content, made = engine("llama", **other).hand_over(PROMPT * 2), engine("llama")
    with pytest.raises(ValueError, match="make both engines alike"):
        made.take_over(content)
    with pytest.raises(ValueError, match="none of hand_over"):
        made.take_over(b"\0" * 40)
    with pytest.raises(ValueError, match="prefix_cache"):
        engine("dynamic").hand_over(PROMPT)


def on_ranks(name: str, layout: dict[str, int], content: bytes) -> tuple[Any, bytes] | None:
    """Go on from blocks, and hand the blocks of other prompts over."""
    with ParallelState(ParallelLayout(**layout)) as state:
        made = Engine(built(name, state), state=state, options=EngineOptions(**OPTIONS))
        if state.rank > 0:
            made.serve()
            return None
        with made:
            held = made.take_over(content)
            found = made.generate(PROMPT, HOW)
            assert made.stats()["prefix_tokens"] == held == 8
            return found, made.hand_over(requests(8)[3][0])


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("dense", "tp 2"),
        ("hybrid", "pp 2"),
        pytest.param("experts", "ep 2", marks=pytest.mark.campaign),
        pytest.param("dense", "tp 2, pp 2", marks=pytest.mark.campaign),
    ],
)
def test_layouts_hand_blocks_to_each_other(ranks, name, layout) -> None:
    one = ParallelState(ParallelLayout())
    first, second = (Engine(built(name, one), options=EngineOptions(**OPTIONS)) for _ in range(2))
    content = first.hand_over(PROMPT)
    world = 4 if "," in layout else 2
    ((found, back), *_) = ranks(world, partial(on_ranks, name, LAYOUTS[layout], content))
    (expected,) = second.generate(PROMPT, HOW)
    assert found[0].tokens == expected.tokens
    assert found[0].logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    prompt = requests(8)[3][0]
    held = second.take_over(back)
    assert held == (len(prompt) // 4) * 4 > 0
    assert second.generate(prompt, HOW)[0].tokens == first.generate(prompt, HOW)[0].tokens


def gone(content: bytes) -> None:
    with ParallelState(ParallelLayout(tp=2)) as state:
        made = Engine(built("dense", state), state=state, options=EngineOptions(**OPTIONS))
        if state.rank == 1:

            def fail(*_: object) -> None:
                raise OSError("the pages are gone")

            made._loop.pool.take = fail
            with pytest.raises(OSError, match="gone"):
                made.serve()
        else:
            made.take_over(content)
            with pytest.raises(RankError, match="rank 1"):
                made.generate(PROMPT, HOW)


def test_a_rank_that_fails_in_a_hand_over_is_named(ranks) -> None:
    state = ParallelState(ParallelLayout())
    first = Engine(built("dense", state), options=EngineOptions(**OPTIONS))
    ranks(2, partial(gone, first.hand_over(PROMPT)))
