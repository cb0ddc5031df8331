"""A progress line on a terminal."""

from __future__ import annotations

import sys
import time

_EVERY = 0.5
_UNITS = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


class Progress:
    """A line on standard error, rewritten at most twice a second.

    Args:
        shown: Whether to write at all; by default, if standard error is a terminal.
    """

    def __init__(self, *, shown: bool | None = None) -> None:
        stream = sys.stderr
        is_terminal = stream is not None and not stream.closed and stream.isatty()
        self.shown = is_terminal if shown is None else shown
        self._begin = time.monotonic()
        self._last = 0.0
        self._width = 0

    def update(
        self,
        what: str,
        done: int,
        total: int | None,
        *,
        tokens: int | None = None,
        unit: str = "B",
    ) -> None:
        """Show the completed work, with the time left, and the tokens made with their speed.

        Args:
            what: The work, such as `encoding`.
            done: Amount of completed work, in bytes or another unit.
            total: Total amount of work, if known.
            tokens: Number of tokens made so far, if there are any.
            unit: Name of the unit.
        """
        now = time.monotonic()
        if not self.shown or now - self._last < _EVERY:
            return
        self._last = now
        seconds = max(now - self._begin, 1e-9)
        text = f"{what}: {_short(done)}{unit}"
        if total:
            text = f"{what}: {done / total:4.0%} of {_short(total)}{unit}"
        if tokens is not None:
            text += f", {_short(tokens)} tokens, {_short(tokens / seconds)} a second"
        if total and done:
            text += f", {_clock(seconds * max(total - done, 0) / done)} left"
        self._write(text)

    def clear(self) -> None:
        """Remove the line."""
        if self._width:
            self._write("")
            sys.stderr.write("\r")
            sys.stderr.flush()
            self._width = 0

    def _write(self, text: str) -> None:
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()
        self._width = len(text)


def _short(number: float) -> str:
    """Format a number with about three digits: 1.23 M."""
    for size, unit in _UNITS:
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g} "


def _clock(seconds: float) -> str:
    """Format a duration as 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
