"""The quickstart leaves what its documentation names, and fine-tuning goes on from there."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "packages/mt-train/examples"
TUNINGS = {"full": [], "lora": ["lora={rank: 16}", "optimizer.lr=3e-3"]}


@pytest.fixture(scope="module")
def begun(cli, tmp_path_factory):
    """Make a folder with a quickstart run of three steps, once for each number of processes."""
    known = {}

    def make(nproc=1):
        if nproc not in known:
            folder = tmp_path_factory.mktemp("quickstart")
            result = cli(
                sys.executable, "-m", "mt_train", "quickstart", "--steps", 3, "--nproc", nproc,
                "--out", folder / "runs/quickstart", "data.max_files=60", timeout=240,
            )  # fmt: skip
            assert result.returncode == 0, result.stderr
            known[nproc] = folder, result.stdout
        return known[nproc]

    return make


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_the_quickstart_leaves_a_whole_run(nproc, begun) -> None:
    folder, output = begun(nproc)
    out = folder / "runs/quickstart"
    for name in ("config.yaml", "loss.png", "tokenizer.json", "checkpoints/latest"):
        assert (out / name).is_file(), name
    assert (out / "checkpoints" / "step_00000003" / "zarr.json").is_file()
    records = records_of(out)
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3]
    assert all(record["tokens_per_second"] > 0 for record in records if "loss" in record)
    assert set(records[-1]) == {"step", "val_loss", "bits_per_byte"}
    assert json.loads((out / "summary.json").read_text())["bits_per_byte"].keys() == {
        "mt", "lzma", "bz2",
    }  # fmt: skip
    assert "a sample" in output


def records_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def recipe(folder: Path, *arguments: object) -> str:
    """Run finetune.py, of which a copy lies in a folder with the other files of the recipe."""
    for path in EXAMPLES.glob("finetune.*"):
        shutil.copy(path, folder)
    command = [sys.executable, "finetune.py", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("tuning", [pytest.param("full", marks=pytest.mark.campaign), "lora"])
def test_a_quickstart_run_is_tuned_on_conversations(tuning, begun, cli, tmp_path) -> None:
    folder, _ = begun()
    recipe(folder)
    run, answers = tmp_path / "run", tmp_path / "answers.jsonl"
    sizes = ["training.steps=8", "training.global_batch_size=2", "training.micro_batch_size=2"]
    tune = ["-m", "mt_train", "run", folder / "finetune.yaml", *TUNINGS[tuning], "--out", run]
    result = cli(sys.executable, *tune, *sizes, "optimizer.warmup=0", "evaluation.max_windows=4")
    assert result.returncode == 0, result.stderr
    losses = [record["loss"] for record in records_of(run) if "loss" in record]
    assert all(map(math.isfinite, losses))
    assert sum(losses[-3:]) < sum(losses[:3]) - 0.3
    asked = ["--prompts", folder / "conversations/held-out.jsonl", "--out", answers]
    ask = ["-m", "mt_infer", "generate", run, "--greedy", "--max-tokens", 2, *asked]
    result = cli(sys.executable, *ask)
    assert result.returncode == 0, result.stderr
    assert recipe(folder, answers) == "0.0% of the answers are right\n"


@pytest.mark.campaign
def test_a_finished_quickstart_run_learns_to_answer(tmp_path) -> None:
    """All of the recipe in docs/mt-train.md, on two cores: it takes about 15 minutes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}

    def call(program: str, *arguments: object) -> float:
        begin = time.monotonic()
        command = [sys.executable, "-m", program, *map(str, arguments)]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=900)
        return time.monotonic() - begin

    def right(run: Path) -> float:
        answers = tmp_path / f"{run.name}.jsonl"
        asked = ["--prompts", tmp_path / "conversations/held-out.jsonl", "--out", answers]
        call("mt_infer", "generate", run, "--greedy", *asked)
        return float(recipe(tmp_path, answers).partition("%")[0])

    recipe(tmp_path)
    call("mt_train", "quickstart")
    before = tmp_path / "runs/quickstart"
    shutil.copy(tmp_path / "finetune.jinja", before / "chat_template.jinja")
    assert right(before) < 10
    for name, options in TUNINGS.items():
        run = tmp_path / "runs" / name
        assert call("mt_train", "run", "finetune.yaml", *options, "--out", run) < 360
        assert right(run) >= 95
