"""Phases: sources and shares change at a stated sample, also in a killed run."""

from __future__ import annotations

import numpy as np
import pytest
from mt_train import ConfigError, load_config
from mt_train.session.drawing import source_names

# Steps of 4 samples: sources change inside step 2 and after step 4.
PHASES = (
    "data.train=[{data}/a,{data}/b]",
    "data.weights=[1,0]",
    "data.phases=[{{from: 6, weights: [1, 1]}}, {{from: 16, weights: [0, 1]}}]",
    "training.steps=6",
)


class KillError(BaseException):
    """The process ends here."""


def killed_at(step):
    """Return a hook that ends a run in the forward pass of a step, counted from 0."""
    steps = iter(range(step + 1))

    def on_event(name):
        if name == "train.forward_backward" and next(steps) == step:
            raise KillError

    return on_event


def test_phases_change_shares_and_a_killed_run_draws_the_same(
    tiny, tmp_path, capsys, rows, losses, weights
) -> None:
    phases = [text.format(data=tiny.data) for text in PHASES]
    tiny.run(tmp_path / "whole", *phases, "logging.every=1")
    said = capsys.readouterr().out
    assert "shares from sample 0 on: a 1\n" in said
    assert "shares from sample 6 on: a 0.5, b 0.5" in said
    assert "shares from sample 16 on: b 1" in said
    assert "samples so far: a 11, b 13" in said
    given = [(r["samples/a"], r["samples/b"]) for r in rows(tmp_path / "whole") if "loss" in r]
    assert given == [(4, 0), (7, 1), (9, 3), (11, 5), (11, 9), (11, 13)]
    every = (*phases, "checkpoint.every=1", "logging.every=1")
    for steps in (1, 2, 2):  # in the first phase, and behind each change
        with pytest.raises(KillError):
            tiny.run(tmp_path / "parts", *every, on_event=killed_at(steps))
    tiny.run(tmp_path / "parts", *every)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    again = [(r["samples/a"], r["samples/b"]) for r in rows(tmp_path / "parts") if "loss" in r]
    assert again == given
    ours, theirs = weights(tmp_path / "parts", 6), weights(tmp_path / "whole", 6)
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value)


@pytest.mark.parametrize(
    ("phases", "text"),
    [
        ("[{from: 3, weights: [1]}]", "data.phases[0].weights: 1 weights for 2 entries"),
        ("[{from: 3}]", "data.phases[0].weights: missing; give one for each of the 2"),
        ("[{from: 3, weights: [0, 0]}]", "data.phases[0].weights: all are 0"),
        ("[{from: 3, weights: [1, -1]}]", "or 0 to leave the source out"),
        ("[{weights: [1, 1]}]", "data.phases[0].from: set exactly one of from"),
        (
            "[{from: 3, weights: [1, 1]}, {from: 3, weights: [1, 2]}]",
            "data.phases[1].from: 3 is not behind the phase before",
        ),
        (
            "[{from: 3, weights: [1, 1]}, {from_tokens: 99, weights: [1, 2]}]",
            "data.phases: have both from and from_tokens",
        ),
    ],
)
def test_wrong_phases_say_what_to_write(tiny, phases, text) -> None:
    train = f"data.train=[{tiny.data}/a,{tiny.data}/b]"
    with pytest.raises(ConfigError) as caught:
        load_config(tiny.config, [train, f"data.phases={phases}"])
    assert text in str(caught.value)


def test_phases_that_others_contradict_are_refused(tiny) -> None:
    train = f"data.train=[{tiny.data}/a,{tiny.data}/b]"
    begins = "data.phases=[{from: 0, weights: [1, 1]}]"
    for other, text in (
        ("data.weights=[1,1]", "data.weights: hold for no sample"),
        ("data.order=megatron", "data.phases: are for data.order: stable"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(tiny.config, [train, begins, other])
        assert text in str(caught.value)


def test_a_phase_by_tokens_begins_with_the_next_whole_sample(tiny) -> None:
    train = f"data.train=[{tiny.data}/a,{tiny.data}/b]"
    phases = "data.phases=[{from_tokens: 32, weights: [1, 2]}, {from_tokens: 33, weights: [2, 1]}]"
    data = load_config(tiny.config, [train, phases]).config.data
    assert data.shares(16) == [(0, ()), (2, (1.0, 2.0)), (3, (2.0, 1.0))]


def test_sources_are_named_by_what_differs(tmp_path) -> None:
    paths = [tmp_path / "web" / "train", tmp_path / "code" / "train"]
    assert source_names(paths) == ["web/train", "code/train"]
    assert source_names([paths[0], paths[0]]) == ["train#0", "train#1"]
