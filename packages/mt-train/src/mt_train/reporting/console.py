"""The console of a run: a live panel on a terminal, plain lines everywhere else."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from datetime import timedelta
from typing import Any, Self, TextIO

from mt_train.reporting.metrics import Record, other_losses


def make_console(*, total_steps: int, every: int) -> Console:
    """Choose the console for stdout, which may be closed."""
    if sys.stdout is None or sys.stdout.closed:
        return Console()
    if sys.stdout.isatty():
        return LivePanel(total_steps=total_steps)
    return PlainLines(total_steps=total_steps, every=every)


class Console:
    """Display of a run's progress; this base class, for all ranks but the first, shows nothing."""

    def step(self, record: Record) -> None:
        """Show one training step."""

    def say(self, text: str) -> None:
        """Show a sentence."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        return None


class PlainLines(Console):
    """One line every few steps, for logs and pipes."""

    def __init__(self, *, total_steps: int, every: int) -> None:
        self._total, self._every = total_steps, every

    def step(self, record: Record) -> None:
        """Print one step."""
        if record["step"] % self._every == 0 or record["step"] == 1 or record["progress"] >= 1:
            cells = "  ".join(f"{name} {value}" for name, value in describe(record).items())
            self.say(f"step {record['step']}/{self._total}  {cells}")

    def say(self, text: str) -> None:
        """Print a sentence.

        Raises:
            OSError: Nobody reads stdout any more, or its disk is full. Buffered text is dropped, so
                that Python does not fail at its end for the same reason.
        """
        try:
            sys.stdout.write(printable(text, sys.stdout) + "\n")
            sys.stdout.flush()
        except OSError:
            _give_up(sys.stdout)
            raise


def _title(record: Record, total: int, done: float) -> str:
    """Return the progress of a run, with the share of its time if time ends it before its steps."""
    title = f"step {record['step']} of {total}"
    by_time = done > record["step"] / total + 1e-9
    return f"{title}, {done:.0%} of the time budget" if by_time else title


class LivePanel(Console):
    """A panel with a progress bar, redrawn a few times a second."""

    def __init__(self, *, total_steps: int) -> None:
        from rich.live import Live

        self._total = total_steps
        self._live = Live(auto_refresh=False)  # a thread of its own would hide its errors
        self._drawn = 0.0

    def step(self, record: Record) -> None:
        """Redraw with the newest step, at most four times a second."""
        now = time.monotonic()
        if now - self._drawn < 0.25 and record["progress"] < 1:
            return
        self._drawn = now
        self._live.update(self._panel(record), refresh=True)

    def say(self, text: str) -> None:
        """Print a sentence above the panel."""
        self._live.console.print(printable(text, sys.stdout), highlight=False, markup=False)

    def _panel(self, record: Record) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for name, value in describe(record).items():
            table.add_row(Text(name, style="dim"), value)  # not markup, which `say` turns off
        done = record.get("progress", record["step"] / self._total)
        bar = ProgressBar(total=1.0, completed=done)
        return Panel(Group(table, bar), title=_title(record, self._total, done))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *details: object) -> None:
        with contextlib.suppress(OSError):  # a terminal that is gone
            self._live.stop()


def printable(text: str, stream: TextIO) -> str:
    """Return a text that a stream can encode, with escapes for other characters."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, errors="backslashreplace").decode(encoding)


def _give_up(stream: TextIO) -> None:
    """Redirect a stream that can't be written to nowhere."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def describe(record: Record) -> dict[str, str]:
    """Turn a step's record into words with units."""
    shown = {
        "loss": f"{record['loss']:.4f}",
        **{name: f"{value:.4g}" for name, value in other_losses(record)},
        "lr": f"{record['lr']:.2e}",
        "grad norm": f"{record['grad_norm']:.3f}",
        **_of_experts(record),
        **({"skipped": str(skipped)} if (skipped := record.get("skipped_steps")) else {}),
        **({"loss scale": f"{record['loss_scale']:g}"} if "loss_scale" in record else {}),
        "tokens/s": f"{record['tokens_per_second']:,.0f}",
        "TFLOP/s": f"{record['tflops_per_second']:.3f}",
    }
    if record.get("mfu") is not None:
        shown["MFU"] = f"{record['mfu']:.1%}"
    shown["memory"] = f"{record['memory_bytes'] / 2**30:.2f} GiB"
    shown["ETA"] = _duration(record["eta_seconds"])
    return shown


def _of_experts(record: Record) -> dict[str, str]:
    if "expert_imbalance" not in record:
        return {}
    text = f"busiest x{record['expert_imbalance']:.2f}"
    dropped = record["dropped_choices"]
    return {"experts": f"{text}, {dropped:.1%} dropped" if dropped else text}


def _duration(seconds: float) -> str:
    years = seconds / (365 * 24 * 3600)
    return str(timedelta(seconds=round(seconds))) if years < 100 else f"{years:.3g} years"
