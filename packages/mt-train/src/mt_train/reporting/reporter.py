"""Reports of a run to metrics.jsonl, TensorBoard and the console."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from mt_parallel_state import StopSignals

from mt_train.reporting.board import Board
from mt_train.reporting.console import Console, printable
from mt_train.reporting.metrics import MetricsFile, Record, of_set, other_losses, sets_of


class Reporter:
    """A reporter of a run's events; on all ranks except the first it reports nothing.

    If a console or a log can't be written any more, the run does not end at once: the log is left
    out, and the run is asked to stop, so it saves first. Later messages go to stderr.

    Args:
        stop: Stop request of the run.
        console: Console for people.
        logs: Logs that keep every record, by name.
    """

    def __init__(
        self,
        stop: StopSignals,
        console: Console | None = None,
        logs: Mapping[str, MetricsFile | Board] | None = None,
    ) -> None:
        self._stop, self._console = stop, console or Console()
        self._logs = dict(logs or {})

    def step(self, record: Record) -> None:
        """Report a training step."""
        self._keep(record)
        self._show(lambda: self._console.step(record))

    def evaluation(self, record: Record) -> None:
        """Report an evaluation."""
        self._keep(record)
        sets, step = sets_of(record), record["step"]
        self.say(f"held out at step {step}: {_losses(record)}" + (", of all" if sets else ""))
        for name in sets:
            self.say(f"  {name}: {_losses(of_set(record, name))}")

    def say(self, text: str) -> None:
        """Report a sentence."""
        if not self._show(lambda: self._console.say(text)):
            self._console.say(text)  # the same words, where they can still be read

    def say_of_rank(self, rank: int, text: str) -> None:
        """Report a sentence about one rank, on any rank; all ranks except the first use stderr."""
        if rank == 0:
            self.say(text)
        else:
            _Stderr().say(f"rank {rank}: {text}")

    def sync(self) -> None:
        """Wait until the logs are on the disk."""
        for name, log in list(self._logs.items()):
            self._try(name, log.sync)

    def _keep(self, record: Record) -> None:
        for name, log in list(self._logs.items()):
            self._try(name, lambda log=log: log.write(record))

    def _try(self, name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except OSError as error:
            del self._logs[name]
            self._stop.request(f"a log that can't be written ({name}: {error.strerror or error})")

    def _show(self, action: Callable[[], Any]) -> bool:
        try:
            action()
        except (OSError, ValueError) as error:  # ValueError: the file is closed
            reason = error.strerror if isinstance(error, OSError) else error
            self._stop.request(f"a console that can't be written ({reason})")
            self._console = _Stderr()
            return False
        return True


def _losses(record: Record) -> str:
    """Write the losses of an evaluation."""
    others = [f"{name} {value:.4g}" for name, value in other_losses(record, "val_")]
    bits = record.get("bits_per_byte")
    others += [] if bits is None else [f"{bits:.4f} bits per byte"]
    return ", ".join([f"loss {record['val_loss']:.4f}", *others])


class _Stderr(Console):
    """The last resort: only sentences, on stderr."""

    def say(self, text: str) -> None:
        """Print a sentence on stderr, if anybody reads it."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(printable(text, sys.stderr) + "\n")
