"""Runs that save in the background: the same bits, and no failure lost."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from mt_ckpt import CheckpointError, verify_checkpoint
from mt_train import ConfigError

ASYNC = "checkpoint.async=true"


class InterruptError(Exception):
    """Stands for a kill: nothing of the run's own handles it."""


@pytest.fixture(scope="module")
def expected(tiny, tmp_path_factory):
    """A run that saves each step while training waits."""
    out = tmp_path_factory.mktemp("foreground") / "run"
    tiny.run(out, "checkpoint.every=1")
    return out


def assert_same(weights, out, expected, steps):
    for step in steps:
        ours, theirs = weights(out, step), weights(expected, step)
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            np.testing.assert_array_equal(value, theirs[name], err_msg=f"{name} of step {step}")
        assert verify_checkpoint(out / "checkpoints" / f"step_{step:08d}") == []


def test_every_step_is_saved_with_the_bits_of_a_save_in_the_foreground(
    tiny, expected, tmp_path, weights, capsys
) -> None:
    outcome = tiny.run(tmp_path, "checkpoint.every=1", ASYNC)
    assert (outcome.step, outcome.stopped) == (4, False)
    assert_same(weights, tmp_path, expected, range(1, 5))
    printed = capsys.readouterr().out
    assert [f"saved {tmp_path}/checkpoints/step_0000000{i}" in printed for i in range(1, 5)] == [
        True
    ] * 4


def test_an_interrupted_run_continues_to_the_same_bits(
    tiny, expected, tmp_path, weights, losses
) -> None:
    updates = []

    def interrupt(name: str) -> None:
        updates.extend([name] if name == "train.update" else [])
        if name == "train.update" and len(updates) == 3:
            raise InterruptError

    with pytest.raises(InterruptError):
        tiny.run(tmp_path, "checkpoint.every=1", ASYNC, on_event=interrupt)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_00000002\n"
    assert tiny.run(tmp_path, "checkpoint.every=1", ASYNC).step == 4
    assert losses(tmp_path) == losses(expected)
    assert_same(weights, tmp_path, expected, range(1, 5))


def fail(point: str, nth: int = 1):
    """Raise an error of the disk at a point of the nth save."""
    seen = []

    def event(name: str) -> None:
        seen.extend([name] if name == point else [])
        if name == point and len(seen) == nth:
            raise OSError(28, "No space left on device")

    return event


@pytest.mark.parametrize(("point", "nth"), [("save.data", 1), ("save.manifest", 4)])
def test_a_failure_ends_the_run_and_what_was_saved_before_continues(
    tiny, expected, tmp_path, weights, point, nth
) -> None:
    with pytest.raises(CheckpointError, match="No space left on device"):
        tiny.run(tmp_path, "checkpoint.every=1", ASYNC, on_event=fail(point, nth))
    assert tiny.run(tmp_path, ASYNC).step == 4
    assert_same(weights, tmp_path, expected, [4])


def test_a_run_that_is_stopped_waits_for_its_last_save(tiny, expected, tmp_path, weights) -> None:
    updates = []

    def stop(name: str) -> None:
        updates.extend([name] if name == "train.update" else [])
        if name == "train.update" and len(updates) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    outcome = tiny.run(tmp_path, ASYNC, on_event=stop)
    assert (outcome.step, outcome.stopped) == (2, True)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_00000002\n"
    assert_same(weights, tmp_path, expected, [2])
    assert tiny.run(tmp_path, ASYNC).step == 4
    assert_same(weights, tmp_path, expected, [4])


def test_a_comparison_of_all_calls_does_not_go_with_it(tiny, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.async: saves in the background"):
        tiny.run(tmp_path, ASYNC, "parallel.check_timeout=60")
