"""A pass that raises ends the request that makes it raise, and no other."""

from __future__ import annotations

from typing import Any

import pytest
from mt_infer import Engine, EngineOptions, Sampling
from mt_infer.engine.chooser import follow
from mt_infer.engine.loop import Loop
from mt_model import GPT, gpt

CONFIG = gpt(
    vocab_size=64, hidden_size=16, num_layers=1, num_heads=2, max_sequence_length=64, init_std=0.4
)
GREEDY = Sampling(temperature=0, max_tokens=8, seed=0)
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


def engine() -> Engine:
    options = EngineOptions(blocks=64, block_size=4)
    return Engine(GPT(CONFIG, seed=3).eval(), options=options)


@pytest.mark.parametrize("place", ["before the pass", "behind the pass", "at its end"])
def test_a_pass_that_raises_ends_the_guilty_request_alone(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine()
    expected = made.generate(PROMPTS, GREEDY)
    scores = made._loop.runner.scores

    def is_guilty(tokens: list[int]) -> bool:
        return tokens[:2] == [4, 5] and len(tokens) == 6

    def failing(parts: Any, places: Any) -> Any:
        if place == "before the pass" and any(is_guilty(each.request.tokens) for each in parts):
            raise ArithmeticError("a bug")
        return scores(parts, places)

    def failing_follow(part: Any, answer: Any, drawn: Any) -> Any:
        if place == "behind the pass" and is_guilty(part.request.tokens):
            raise ArithmeticError("a bug")
        return follow(part, answer, drawn)

    def failing_end(loop: Loop, answer: Any, end: Any, new: int = 0) -> None:
        if place == "at its end" and answer.request.tokens[:2] == [4, 5] and answer.error is None:
            raise ArithmeticError("a bug")
        told(loop, answer, end, new)

    told = Loop._tell_end
    monkeypatch.setattr(made._loop.runner, "scores", failing)
    monkeypatch.setattr("mt_infer.engine.loop.follow", failing_follow)
    monkeypatch.setattr(Loop, "_tell_end", failing_end)
    answers = made.answers(PROMPTS, GREEDY)
    with made.submitted(answers):
        while made.advance():
            pass
    assert [str(each.error) for each in answers] == ["None", "a bug", "None"]
    assert [each.completion for each in answers[::2]] == expected[::2]
    assert made.stats()["free_blocks"] == 64
    with pytest.raises(ArithmeticError):
        made.generate(PROMPTS[1], GREEDY)
