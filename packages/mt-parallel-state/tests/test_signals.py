"""Signals: asked first, ended second, and heard inside a wait of C++ code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import mt_parallel_state
import pytest
from mt_parallel_state import stop_signals

NUMBERS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
# A store wait is a loop of C++ code, in which Python runs no handler.
JOINING = """
    from mt_parallel_state.store import host_on_loopback
    store = host_on_loopback()
    with stop_signals() as stop:
        stop.note = "nothing is saved"
        say("ready")
        store.get("what nobody sets")
"""


def _start(body: str) -> subprocess.Popen[str]:
    # A program that needs no torch starts ten times faster without it.
    head = f"""
    import os, signal, sys, time
    sys.path.append({str(Path(mt_parallel_state.__file__).parent)!r})
    from signals import stop_signals
    def say(text): print(text, flush=True)
    """
    code = textwrap.dedent(head) + textwrap.dedent(body)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(n, marks=pytest.mark.campaign) for n in NUMBERS[::2])]
)
def test_a_signal_ends_a_wait_of_foreign_code_at_once(number: signal.Signals) -> None:
    process = _start(JOINING)
    start = time.monotonic()
    process.send_signal(number)
    _, text = process.communicate(timeout=20)
    assert time.monotonic() - start < 5
    assert process.returncode == 128 + number
    assert text == f"{number.name}: nothing is saved\n"


def test_the_first_signal_asks_and_the_second_ends_foreign_code() -> None:
    process = _start(
        JOINING.replace(
            "with stop_signals() as stop:", "with stop_signals() as stop, stop.deferred():"
        ).replace("stop.note =", "stop.answer = 'saving first'; stop.note =")
    )
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.7)
    process.send_signal(signal.SIGTERM)
    _, text = process.communicate(timeout=20)
    assert (process.returncode, text) == (143, "SIGTERM: saving first\nSIGTERM: nothing is saved\n")


@pytest.mark.parametrize("number", NUMBERS)
def test_a_request_is_seen_when_the_sending_call_returns(number: signal.Signals) -> None:
    before = [signal.getsignal(n) for n in NUMBERS]
    with stop_signals() as stop, stop.deferred():
        assert (stop.requested, stop.reason) == (False, "")
        os.kill(os.getpid(), number)
        assert (stop.requested, stop.reason) == (True, number.name)
    assert [signal.getsignal(n) for n in NUMBERS] == before


def test_a_program_may_ask_itself_and_still_hears_one_signal() -> None:
    with stop_signals() as stop, stop.deferred():
        stop.request("the console is gone")
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.reason == "the console is gone"


def test_after_the_deferred_block_a_signal_ends_at_once() -> None:
    process = _start(
        """
        with stop_signals() as stop:
            with stop.deferred():
                os.kill(os.getpid(), signal.SIGINT)
            stop.note = "step 4 is saved"
            say("ready")
            time.sleep(60)
        """
    )
    process.send_signal(signal.SIGTERM)
    _, text = process.communicate(timeout=20)
    assert (process.returncode, text) == (143, "SIGTERM: step 4 is saved\n")


def test_an_ignored_signal_stays_ignored() -> None:
    process = _start(
        """
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with stop_signals() as stop, stop.deferred():
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
            say("ready")
        """
    )
    assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 0


def test_a_forked_child_has_signals_of_its_own() -> None:
    process = _start(
        """
        with stop_signals() as stop, stop.deferred():
            child = os.fork()
            if child == 0:
                time.sleep(60)
            time.sleep(0.2)
            os.kill(child, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
            time.sleep(0.2)
            assert not stop.requested
            say("ready")
        """
    )
    assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 0


def test_outside_the_main_thread_nothing_is_heard_and_nothing_changes() -> None:
    before, found = signal.getsignal(signal.SIGTERM), []

    def body() -> None:
        with stop_signals() as stop, stop.deferred():
            found.append((stop.requested, signal.getsignal(signal.SIGTERM) is before))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [(False, True)]
