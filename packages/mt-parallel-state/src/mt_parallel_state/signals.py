"""What SIGTERM, SIGINT (Ctrl-C) and SIGHUP do to a program.

Python runs a handler between two instructions of the main thread, so a rank that waits for others
inside torch would not notice a signal for as long as it waits. Here a thread of its own acts on
signals: the kernel's call writes the number into a pipe, and the thread reads it there.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

_SAME_HANGUP_SECONDS = 0.5
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """The state of stop signals: whether a stop was requested, and what the next signal does.

    Outside `deferred()` a signal ends the process at once. Inside, the first signal is a request,
    and the second signal ends the process at once.

    Attributes:
        requested: Whether a stop was requested; the program acts on it at its next safe point.
        reason: The signal's name, or the argument of `request`.
        note: A line for stderr when a signal ends the process at once, such as whether the state
            was saved. Empty prints nothing.
        answer: A line for stderr when a signal requests a stop.
        exit_code: Exit code when a signal ends the process at once; None is 128 + its number.
    """

    def __init__(self) -> None:
        self.requested = False
        self.reason = ""
        self.note = ""
        self.answer = ""
        self.exit_code: int | None = None
        self._deferred = False
        self._asked = False

    def request(self, reason: str) -> None:
        """Request a stop from inside the program, e.g. because its console is gone."""
        if not self.requested:
            self.requested, self.reason = True, reason

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Take the first signal as a request while the block runs."""
        before, self._deferred = self._deferred, True
        try:
            yield
        finally:
            self._deferred = before

    def _act(self, number: int) -> None:
        name = signal_name(number)
        if self._deferred and not self._asked:
            self._asked = True
            self.request(name)
            _say(name, self.answer)
            return
        _say(name, self.note)
        os._exit(128 + number if self.exit_code is None else self.exit_code)


def _say(name: str, text: str) -> None:
    if text:
        with suppress(OSError):  # the terminal may be what is gone
            os.write(2, f"{name}: {text}\n".encode(errors="replace"))


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Listen to SIGTERM, SIGINT and SIGHUP while the block runs.

    Signals that were already ignored stay ignored (`nohup`). A SIGHUP right after another signal
    counts as the same signal, since the kernel and the shell both send it when a terminal closes.
    Processes forked inside the block have the previous handlers. Outside the main thread, where
    Python allows no handlers, the block runs without listening.

    Example:
        with stop_signals() as stop:
            stop.note = "nothing was trained yet, so nothing is saved"
            join_and_read_data()  # a signal ends the process here, with the note
            with stop.deferred():  # here the first signal is only a request
                while not stop.requested:
                    train_step()
                save()
            sys.exit(75 if stop.requested else 0)
    """
    stop = StopSignals()
    with signals_to(stop._act):
        yield stop


@contextmanager
def signals_to(act: Callable[[int], None]) -> Iterator[None]:
    """Call `act` once for each stop signal, with the signal's number.

    The call is in another thread, or in the main thread if that is quicker. When this process sends
    a signal to itself, `act` has run before the sending call returns.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    listener = _Listener(act)
    listener.start()
    try:
        yield
    finally:
        listener.stop()


class _Listener:
    def __init__(self, act: Callable[[int], None]) -> None:
        self._act = act
        self._lock = threading.RLock()  # a handler may interrupt a handler
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._ended = False
        self._last = float("-inf")
        self._previous: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._listen, name="stop-signals", daemon=True)

    def start(self) -> None:
        heard = [n for n in STOP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
        self._previous_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in heard:
            self._previous[number] = signal.signal(number, self._handle)
        self._thread.start()
        own = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: (it := own()) is not None and it._forget())

    def stop(self) -> None:
        self._forget()
        os.write(self._writer, b"\0")
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def _forget(self) -> None:
        """Give the signals back; in a forked child, whose pipe is its parent's."""
        if self._ended:
            return
        self._ended = True
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._drain()

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        while not self._ended:
            poll.poll()
            self._drain()

    def _drain(self) -> None:
        with self._lock, suppress(BlockingIOError):
            for number in os.read(self._reader, 64):
                if number in self._previous and not self._is_echo(number):
                    self._act(number)

    def _is_echo(self, number: int) -> bool:
        now, before = time.monotonic(), self._last
        self._last = now
        return number == signal.SIGHUP and now - before < _SAME_HANGUP_SECONDS


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
