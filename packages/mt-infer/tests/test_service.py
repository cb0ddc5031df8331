"""Priorities, deadlines and callers of requests."""

from __future__ import annotations

from typing import Any

import pytest
from mt_infer import Engine, EngineOptions, Sampling, Service
from mt_model import GPT, gpt

CONFIG = gpt(
    vocab_size=64, hidden_size=16, num_layers=1, num_heads=2, max_sequence_length=64, init_std=0.4
)
PROMPT = list(range(1, 22))
GREEDY = Sampling(temperature=0, max_tokens=12, seed=0)


def engine(**how: Any) -> Engine:
    options = EngineOptions(**{"blocks": 16, "block_size": 4} | how)
    return Engine(GPT(CONFIG, seed=3).eval(), options=options)


def test_cached_blocks_are_found_by_their_caller_alone() -> None:
    made, found = engine(blocks=64), []
    for caller in ("a", "b", "a", "b", ""):
        before = made.stats()["prefix_tokens"]
        made.generate(PROMPT, GREEDY, service=Service(caller=caller))
        found.append(made.stats()["prefix_tokens"] - before)
    assert found == [0, 0, 20, 20, 0]


def test_a_request_ends_at_its_deadline_with_what_it_has(monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr("mt_infer.engine.loop.time.monotonic", lambda: now[0])
    made = engine()
    other = made.stream([3, 4], GREEDY)
    stream = made.stream(PROMPT, GREEDY, service=Service(deadline_s=5))
    begun = [next(stream) for _ in range(3)]
    now[0] += 4.9
    begun.append(next(stream))
    now[0] += 0.2
    ended = [*begun, *stream][-1].completion
    assert (len(ended.tokens), ended.end) == (4, "deadline")
    assert [*other][-1].completion.end == "length"
    assert made.stats()["free_blocks"] == 16


def test_a_request_of_a_higher_priority_takes_the_blocks_of_others() -> None:
    made = engine(blocks=9)
    expected = made.generate([PROMPT, PROMPT[::-1]], GREEDY)
    low = made.stream(PROMPT, GREEDY)
    begun = [next(low) for _ in range(2)]
    (high,) = made.generate(PROMPT[::-1], GREEDY, service=Service(priority=1))
    assert made.stats()["waiting"] == 1  # the first one waits until the other has ended
    assert [high, [*begun, *low][-1].completion] == [expected[1], expected[0]]
    assert made.stats()["evictions"] > 0


def test_a_deadline_that_has_passed_is_refused() -> None:
    with pytest.raises(ValueError, match="deadline_s"):
        Service(deadline_s=0)
