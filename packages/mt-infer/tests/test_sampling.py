"""Sampling against closed-form probabilities."""

from __future__ import annotations

import pytest
import torch
from mt_infer import LogitsError, Sampling, choose

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
PROBABILITIES = [0.6439, 0.2369, 0.0871, 0.0321]


def counts(sampling: dict, draws: int = 4000) -> list[float]:
    rows = LOGITS.expand(draws, 4)
    tokens = choose(rows, Sampling(seed=5, **sampling), range(draws))
    return (torch.bincount(tokens, minlength=4) / draws).tolist()


def test_temperature_zero_is_greedy() -> None:
    assert choose(LOGITS.flip(-1), Sampling(temperature=0), 0).tolist() == [3]


def test_frequencies_follow_the_softmax() -> None:
    assert counts({}) == pytest.approx(PROBABILITIES, abs=0.03)


@pytest.mark.parametrize(("top_p", "kept"), [(0.88, 2), (0.89, 3), (1.0, 4), (0.01, 1)])
def test_top_p_keeps_the_token_that_crosses_p(top_p: float, kept: int) -> None:
    seen = counts({"top_p": top_p})
    assert [share > 0 for share in seen] == [index < kept for index in range(4)]


def test_top_k_keeps_ties_with_the_kth() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 0.0]]).expand(500, 4)
    tokens = choose(logits, Sampling(top_k=2), range(500))
    assert sorted(set(tokens.tolist())) == [0, 1, 2]


def test_top_k_of_one_is_greedy() -> None:
    assert counts({"top_k": 1}) == [1.0, 0.0, 0.0, 0.0]


def test_low_temperature_sharpens() -> None:
    cold = torch.softmax(LOGITS[0] / 0.5, 0).tolist()
    assert counts({"temperature": 0.5}) == pytest.approx(cold, abs=0.03)


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.tensor([[-1.0, 3.0, 2.0], [-9.0, -8.0, float("-inf")]])
    assert choose(logits, Sampling(temperature=temperature), 0).tolist() == [1, 1]


def test_minus_infinity_is_never_drawn() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 0.0, float("-inf")]]).expand(300, 4)
    assert set(choose(logits, Sampling(), range(300)).tolist()) == {0, 2}


def test_seed_and_position_change_the_draw_and_the_row_does_not() -> None:
    rows, places = torch.zeros(64, 1000), list(range(64))
    first = choose(rows, Sampling(seed=1), places)
    assert torch.equal(first.flip(0), choose(rows, Sampling(seed=1), places[::-1]))
    assert not torch.equal(first, choose(rows, Sampling(seed=2), places))
    assert len(set(first.tolist())) > 50
    assert len(set(choose(rows, Sampling(seed=1), 3).tolist())) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "temperature: -1.0 is too small"),
        ({"temperature": float("nan")}, "temperature: expected a number, found nan"),
        ({"top_k": -1}, "top_k: -1 is too small"),
        ({"top_p": 0.0}, "top_p: 0.0 must be greater"),
        ({"top_p": 1.5}, "top_p: 1.5 is too large"),
        ({"min_p": -0.1}, "min_p: "),
        ({"stop": [""]}, "stop: "),
        ({"bad_words": [[]]}, "bad_words: "),
        ({"n": 0}, "n: "),
        ({"repetition_penalty": 0}, "repetition_penalty: "),
    ],
)
def test_settings_out_of_range_are_refused(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**values)


@pytest.mark.parametrize("temperature", ["hot", None, True])
def test_a_setting_of_another_type_is_named(temperature: object) -> None:
    with pytest.raises(ValueError, match="temperature: "):
        Sampling(temperature=temperature)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("logits", "sampling", "message"),
    [
        (None, Sampling(), r"logits must be a tensor of shape \[B, vocab\], not NoneType"),
        (torch.zeros(4), Sampling(), r"not of \(4,\)"),
        (torch.zeros(2, 0), Sampling(), r"not of \(2, 0\)"),
        (LOGITS, 0.5, "sampling must be a Sampling, not float"),
    ],
)
def test_arguments_of_another_type_are_named(logits, sampling, message) -> None:
    with pytest.raises(TypeError, match=message):
        choose(logits, sampling, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "bad", [[0.0, float("nan"), 1.0], [float("-inf")] * 3, [0.0, float("inf"), 1.0]]
)
def test_a_row_without_a_largest_number_is_named(bad: list[float], temperature: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], bad])
    with pytest.raises(LogitsError, match="row 1 of the logits"):
        choose(logits, Sampling(temperature=temperature), 0)
