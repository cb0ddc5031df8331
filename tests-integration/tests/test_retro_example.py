"""The example of a model that looks facts up: it writes what its database says."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "packages/mt-train/examples"
CASES = ("their neighbours", "other keys' neighbours", "no neighbours")


def recipe(folder: Path, *arguments: object) -> str:
    """Run retro.py in a folder with the other file of the recipe."""
    for path in EXAMPLES.glob("retro.*"):
        shutil.copy(path, folder)
    command = [sys.executable, "retro.py", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def shares_of(told: str) -> dict[str, float]:
    found = dict(re.findall(r"^([\d.]+) of a guess's loss with (.*)$", told, re.MULTILINE))
    return {name: float(share) for share, name in found.items()}


def call(folder: Path, program: str, *arguments: object) -> float:
    begin, environment = time.monotonic(), {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", program, *map(str, arguments)]
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=900)
    return time.monotonic() - begin


def ask(folder: Path, database: str) -> str:
    answers = folder / f"{database}.jsonl"
    how = ["--greedy", "--max-tokens", 4, "--prompts", "facts/asked.jsonl", "--out", answers]
    call(folder, "mt_infer", "generate", "runs/retro", "--database", f"facts/{database}", *how)
    return recipe(folder, answers)


def test_the_recipe_runs_on_few_documents(tmp_path) -> None:
    recipe(tmp_path, 300)
    sizes = ["training.steps=8", "training.time_budget=null", "optimizer.warmup=2"]
    call(tmp_path, "mt_train", "run", "retro.yaml", *sizes, "--out", "runs/retro")
    lines = (tmp_path / "runs/retro/metrics.jsonl").read_text().splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
    assert losses[-1] < losses[0] - 0.5
    shares = shares_of(recipe(tmp_path, "losses", "runs/retro"))
    assert tuple(shares) == CASES
    assert all(0.5 < share < 2 and math.isfinite(share) for share in shares.values())
    told = ask(tmp_path, "db")
    assert re.fullmatch(r"\S+% of the answers are those of facts/db, \S+% .* facts/new-db\n", told)


@pytest.mark.campaign
def test_values_come_from_the_database_alone(tmp_path) -> None:
    """All of the recipe in docs/recipes.md, on two cores."""
    begin = time.monotonic()
    recipe(tmp_path)
    call(tmp_path, "mt_train", "run", "retro.yaml", "--out", "runs/retro")
    assert time.monotonic() - begin < 360
    shares = shares_of(recipe(tmp_path, "losses", "runs/retro"))
    own, other, none = (shares[name] for name in CASES)
    assert own < 0.2
    assert min(other, none) >= 0.95
    for database, place in (("db", 0), ("new-db", 1)):
        right = re.findall(r"([\d.]+)%", ask(tmp_path, database))
        assert float(right[place]) >= 95
        assert float(right[1 - place]) < 5
