"""metrics.jsonl, the console and the picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mt_train.reporting.console import PlainLines, describe
from mt_train.reporting.metrics import MetricsFile, parse_record, read_metrics
from mt_train.reporting.plot import draw_loss

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


def test_losses_by_name_follow_the_language_models() -> None:
    shown = describe({**RECORD, "aux_loss": 1.00049, "total_loss": 5.5})
    assert list(shown)[:3] == ["loss", "aux loss", "total loss"]
    assert (shown["aux loss"], shown["total loss"]) == ("1", "5.5")
    assert parse_record(b'{"step": 1, "loss": 1.0, "aux_loss": "2"}') is None
    assert parse_record(b'{"step": 1, "loss": 1.0, "aux_loss": null}') is not None


def test_the_loss_picture_is_a_png(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    rows = [{**RECORD, "step": step, "loss": 5 / step} for step in range(1, 30)]
    rows.append({"step": 29, "val_loss": 0.3, "bits_per_byte": 1.0})
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw_loss(metrics, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


BAD_LINES = {
    "a NUL": b'{"step": 10, \x00"loss": 1.0}\n',
    "no UTF-8": b'{"step": 10, "loss": "\xff\xfe"}\n',
    "no object": b"[10]\n",
    "no step": b'{"loss": 1.0}\n',
    "a step of text": b'{"step": "10", "loss": 1.0}\n',
    "a negative step": b'{"step": -1, "loss": 1.0}\n',
    "a long number": b'{"step": ' + b"9" * 5000 + b"}\n",
    "a loss of text": b'{"step": 10, "loss": "1.0"}\n',
    "NaN": b'{"step": 10, "loss": NaN}\n',
    "deep nesting": b"[" * 50_000 + b"\n",
    "an empty line": b"\n",
}


@pytest.mark.parametrize("bad", BAD_LINES.values(), ids=BAD_LINES)
def test_a_damaged_line_is_kept_aside_and_nothing_after_it_is_lost(
    bad: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}).encode() + b"\n" for step in range(1, 42)]
    path.write_bytes(b"".join([*lines[:9], bad, *lines[10:]]))
    metrics = MetricsFile(path, resume_step=41)
    metrics.close()
    assert metrics.damaged == [10]
    assert [row["step"] for row in read_metrics(path)] == [*range(1, 10), *range(11, 42)]
    assert (tmp_path / "metrics.damaged").read_bytes() == bad
    again = MetricsFile(path, resume_step=41)
    again.close()
    assert again.damaged == []


def test_a_number_that_json_has_not_is_null(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl", resume_step=0)
    metrics.write({"step": 1, "loss": float("nan"), "lr": 0.5})
    metrics.sync()
    metrics.close()
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [{"step": 1, "loss": None, "lr": 0.5}]


def test_metrics_and_picture_never_follow_a_link_out_of_the_folder(tmp_path: Path) -> None:
    from mt_files import FileError

    run, victim = tmp_path / "run", tmp_path / "victim"
    run.mkdir()
    victim.write_text("precious")
    for name in (".metrics.jsonl.tmp", "loss.png", "metrics.damaged"):
        (run / name).symlink_to(victim)
    metrics = run / "metrics.jsonl"
    metrics.write_text(json.dumps(RECORD) + "\n")
    MetricsFile(metrics, resume_step=1).close()
    draw_loss(metrics, run / "loss.png")
    metrics.write_text("damaged\n")
    with pytest.raises(OSError):  # noqa: PT011 - the system's word for a link differs
        MetricsFile(metrics, resume_step=1)
    metrics.unlink()
    metrics.symlink_to(victim)
    with pytest.raises(FileError, match="leads out of"):
        MetricsFile(metrics, resume_step=1)
    assert victim.read_text() == "precious"


def test_an_absurd_time_to_the_end_is_said_in_years() -> None:
    assert describe({**RECORD, "eta_seconds": 1e18})["ETA"] == "3.17e+10 years"
