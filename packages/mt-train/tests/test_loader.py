"""The next step's batches are read while a step computes, and no others."""

from __future__ import annotations

import threading

import pytest
from mt_train.loader import Loader


class Sampler:
    """Notes which step is read in which thread."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.read: list[tuple[int, bool]] = []
        self.fails_at = fails_at

    def step(self, step: int) -> list:
        self.read.append((step, threading.current_thread() is threading.main_thread()))
        if step == self.fails_at:
            raise OSError("a bad disk")
        return [step]


def test_each_step_is_read_once_and_ahead_of_its_time() -> None:
    sampler = Sampler()
    loader = Loader(sampler, steps=5)  # type: ignore[arg-type]
    for step in range(2, 5):
        assert loader.step(step) == [step]
    assert sampler.read == [(2, True), (3, False), (4, False)]


def test_a_step_out_of_order_is_read_at_once() -> None:
    sampler = Sampler()
    loader = Loader(sampler, steps=100)  # type: ignore[arg-type]
    assert [loader.step(step) for step in (0, 7, 8, 3)] == [[0], [7], [8], [3]]


def test_an_error_of_the_thread_is_raised_at_its_step() -> None:
    loader = Loader(Sampler(fails_at=1), steps=3)  # type: ignore[arg-type]
    assert loader.step(0) == [0]
    with pytest.raises(OSError, match="a bad disk"):
        loader.step(1)
