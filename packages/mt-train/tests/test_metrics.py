"""metrics.jsonl, the console and the picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mt_train.console import PlainLines, describe
from mt_train.metrics import MetricsFile, read_metrics
from mt_train.plot import draw_loss

RECORD = {
    "step": 1,
    "loss": 2.5,
    "lr": 1e-3,
    "grad_norm": 0.5,
    "tokens_per_second": 12345.6,
    "tflops_per_second": 0.25,
    "mfu": None,
    "memory_bytes": 2**30,
    "progress": 0.5,
    "eta_seconds": 61.0,
}


def test_resuming_forgets_later_records_and_cut_off_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2, 3, 4)]
    path.write_text("\n".join(lines) + '\n{"step": 5, "lo')
    metrics = MetricsFile(path, resume_step=2)
    metrics.write({"step": 3, "loss": 0.5})
    metrics.close()
    assert list(read_metrics(path)) == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 1.0},
        {"step": 3, "loss": 0.5},
    ]


def test_a_new_run_starts_with_an_empty_file(tmp_path: Path) -> None:
    MetricsFile(tmp_path / "metrics.jsonl", resume_step=0).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_plain_lines_show_the_first_the_last_and_every_nth_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = PlainLines(total_steps=25, every=10)
    for step in range(1, 24):  # a time budget ended this run before its 25 steps
        lines.step({**RECORD, "step": step, "progress": 1.0 if step == 23 else step / 25})
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed] == ["1/25", "10/25", "20/25", "23/25"]
    assert "loss 2.5000" in printed[0]
    assert "ETA 0:01:01" in printed[0]


def test_mfu_is_shown_only_where_a_peak_is_known() -> None:
    assert "MFU" not in describe(RECORD)
    assert describe({**RECORD, "mfu": 0.5})["MFU"] == "50.0%"


def test_the_loss_picture_is_a_png(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    rows = [{**RECORD, "step": step, "loss": 5 / step} for step in range(1, 30)]
    rows.append({"step": 29, "val_loss": 0.3, "bits_per_byte": 1.0})
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw_loss(metrics, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
