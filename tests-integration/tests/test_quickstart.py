"""The quickstart leaves what its documentation names, on one process and on two."""

from __future__ import annotations

import json
import sys

import pytest


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_the_quickstart_leaves_a_whole_run(nproc, tmp_path, cli) -> None:
    out = tmp_path / "run"
    result = cli(
        sys.executable, "-m", "mt_train", "quickstart",
        "--steps", 3, "--nproc", nproc, "--out", out, "data.max_files=60", timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    for name in ("config.yaml", "loss.png", "tokenizer.json", "checkpoints/latest"):
        assert (out / name).is_file(), name
    assert (out / "checkpoints" / "step_00000003" / "zarr.json").is_file()
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3]
    assert all(record["tokens_per_second"] > 0 for record in records if "loss" in record)
    assert set(records[-1]) == {"step", "val_loss", "bits_per_byte"}
    assert json.loads((out / "summary.json").read_text())["bits_per_byte"].keys() == {
        "mt", "lzma", "bz2",
    }  # fmt: skip
    assert "a sample" in result.stdout
