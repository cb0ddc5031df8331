"""A console or a log that fails asks the run to stop, and messages are still printed."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from mt_parallel_state import StopSignals
from mt_train.reporting.console import Console, LivePanel, PlainLines, make_console, printable
from mt_train.reporting.reporter import Reporter

RECORD = {"step": 1, "loss": 1.0}
_SPEED = {"tokens_per_second": 1.0, "tflops_per_second": 1.0, "memory_bytes": 1, "eta_seconds": 1}
STEP = {**RECORD, "lr": 0.1, "grad_norm": 1.0, **_SPEED}


class Log:
    """Keeps records until it breaks."""

    def __init__(self, *, broken: bool = False) -> None:
        self.rows: list[dict] = []
        self.broken = broken

    def write(self, record: dict) -> None:
        if self.broken:
            raise OSError(28, "No space left on device")
        self.rows.append(record)

    def sync(self) -> None:
        self.write({})


def test_a_dead_console_asks_for_a_stop_and_the_rest_is_said_on_stderr(capsys) -> None:
    class Dead(Console):
        def say(self, text: str) -> None:
            raise BrokenPipeError(32, "Broken pipe")

    stop, log = StopSignals(), Log()
    reporter = Reporter(stop, Dead(), {"metrics.jsonl": log})
    reporter.say("saved")
    reporter.step(RECORD)
    reporter.say("stopped")
    assert stop.requested
    assert stop.reason == "a console that can't be written (Broken pipe)"
    assert capsys.readouterr().err == "saved\nstopped\n"
    assert log.rows == [RECORD]


def test_an_evaluation_tells_every_loss() -> None:
    said: list[str] = []

    class Heard(Console):
        def say(self, text: str) -> None:
            said.append(text)

    record = {"step": 3, "val_loss": 1.0, "val_aux_loss": 0.25, "bits_per_byte": 2.0}
    Reporter(StopSignals(), Heard()).evaluation(record)
    assert said == ["held out at step 3: loss 1.0000, aux loss 0.25, 2.0000 bits per byte"]


@pytest.mark.parametrize("when", ["write", "sync"])
def test_a_dead_log_asks_for_a_stop_and_the_others_go_on(when) -> None:
    stop, dead, log = StopSignals(), Log(broken=True), Log()
    reporter = Reporter(stop, None, {"metrics.jsonl": dead, "tensorboard": log})
    reporter.step(RECORD) if when == "write" else reporter.sync()
    reporter.step(RECORD)
    assert stop.reason == "a log that can't be written (metrics.jsonl: No space left on device)"
    assert log.rows[-1] == RECORD


def test_a_full_disk_under_the_console_is_an_error_once_and_none_at_the_end() -> None:
    import subprocess

    code = (
        "import sys\n"
        "from mt_train.reporting.console import PlainLines\n"
        "lines = PlainLines(total_steps=1, every=1)\n"
        "try:\n"
        "    lines.say('x')\n"
        "except OSError as error:\n"
        "    sys.stderr.write(error.strerror)\n"
    )
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, check=True
        )
    assert done.stderr == "No space left on device"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_and_any_path_can_be_printed(encoding, monkeypatch) -> None:
    data = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(data, encoding=encoding))
    PlainLines(total_steps=1, every=1).say("saved läufe/\udcff/中")
    sys.stdout.flush()
    assert data.getvalue().startswith(b"saved l")
    assert b"\\udcff" in data.getvalue()
    assert printable("plain", sys.stdout) == "plain"


def test_a_process_without_a_console_is_silent(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    console = make_console(total_steps=1, every=1)
    with console:
        console.say("nobody hears")


def test_the_panel_has_no_markup_of_its_own_after_a_sentence(monkeypatch) -> None:
    import rich.console

    panel = LivePanel(total_steps=10_000)
    shown = io.StringIO()
    panel._live.console = rich.console.Console(file=shown, force_terminal=True, width=80)
    with panel:
        panel.step({**STEP, "step": 1395, "progress": 0.5})
        panel.say("saved [dim] step")
    assert "[dim]loss" not in shown.getvalue()
    assert "saved [dim] step" in shown.getvalue()
    assert "50% of the time budget" in shown.getvalue()
