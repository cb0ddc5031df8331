"""Callers of an engine take turns, in the order in which they asked."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from mt_infer import Engine, EngineOptions, Sampling
from mt_infer.engine.lock import FairLock
from mt_model import GPT, gpt


def wait_for(lock: FairLock, count: int) -> None:
    """Wait until as many threads wait for a lock."""
    while len(lock._waiting) < count:
        time.sleep(0.001)


def test_a_caller_that_goes_on_takes_no_step_before_one_that_waits(monkeypatch) -> None:
    config = gpt(vocab_size=64, hidden_size=32, num_layers=1, num_heads=4, max_sequence_length=64)
    made = Engine(GPT(config, seed=3).eval(), options=EngineOptions(blocks=16))
    loop, callers = made._loop, list[int]()
    step = loop.step

    def noted() -> None:
        step()
        callers.append(threading.get_ident())
        if len(callers) == 1:  # the other one comes before the first step ends
            other.start()
            wait_for(loop.lock, 1)

    monkeypatch.setattr(loop, "step", noted)
    how = Sampling(temperature=0, max_tokens=8)
    other = threading.Thread(target=lambda: list(made.stream([1, 2], how)))
    made.generate([3, 4], how)
    other.join()
    assert callers[:2] == [threading.get_ident(), other.ident]


def test_a_lock_goes_round_in_the_order_of_those_who_asked() -> None:
    lock, order = FairLock(), list[int]()

    def work(number: int) -> None:
        with lock:
            order.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    with lock:
        for count, thread in enumerate(threads, start=1):
            thread.start()
            wait_for(lock, count)
        with lock:
            pass
        assert not order, "the outer block still has it"
    work(4)
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4]


def test_a_lock_is_refused_at_once_or_without_having_it() -> None:
    lock, found = FairLock(), list[Any]()
    with lock:
        thread = threading.Thread(target=lambda: found.append(lock.acquire(blocking=False)))
        thread.start()
        thread.join()
    assert found == [False]
    with pytest.raises(RuntimeError, match="acquire"):
        lock.release()
    assert lock.acquire(blocking=False)
    lock.release()


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_a_waiting_thread_that_is_interrupted_leaves_the_lock_to_the_next(
    monkeypatch, is_handed_over
) -> None:
    lock, real = FairLock(), threading.Lock
    asked, may_go = threading.Event(), threading.Event()

    class Interrupted:
        """A turn whose second `acquire` a signal ends, before or after the hand-over."""

        def __init__(self) -> None:
            self.count = 0

        def acquire(self) -> None:
            self.count += 1
            if self.count == 2:
                asked.set()
                may_go.wait()
                raise KeyboardInterrupt

        def release(self) -> None:
            may_go.set()

    def work() -> None:
        with pytest.raises(KeyboardInterrupt), lock:
            pass

    thread = threading.Thread(target=work)
    with lock:
        monkeypatch.setattr(threading, "Lock", Interrupted)
        thread.start()
        asked.wait()
        monkeypatch.setattr(threading, "Lock", real)
        if not is_handed_over:
            may_go.set()
            thread.join()
    thread.join()
    assert lock.acquire(blocking=False)
