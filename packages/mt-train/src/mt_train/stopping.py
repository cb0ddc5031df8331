"""A request to stop: SIGTERM from a scheduler, or Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether this process was asked to stop; the run acts on it at the next safe point."""

    def __init__(self) -> None:
        self.made = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Turn SIGTERM and SIGINT into a request while the block runs."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python delivers signals to the main thread only
            return

        def note(number: int, frame: FrameType | None) -> None:
            self.made = True

        numbers = (signal.SIGTERM, signal.SIGINT)
        previous = [signal.signal(number, note) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, previous, strict=True):
                signal.signal(number, handler)
