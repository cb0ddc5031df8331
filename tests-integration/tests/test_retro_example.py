"""The example of a model that looks facts up: it writes what its database says."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "packages/mt-train/examples"
CASES = ("their neighbours", "other keys' neighbours", "no neighbours")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The two files of the recipe in a folder, and an interpreter for its commands."""

    folder: Path
    python: Path | str

    def script(self, *arguments: object) -> str:
        """Run retro.py; return what it prints."""
        for path in EXAMPLES.glob("retro.*"):
            shutil.copy(path, self.folder)
        return self._run("retro.py", *arguments)

    def call(self, program: str, *arguments: object) -> None:
        """Run one of our programs."""
        self._run("-m", program, *arguments)

    def ask(self, database: str) -> str:
        """Return what retro.py says of the answers from a database."""
        answers = self.folder / f"{database}.jsonl"
        how = ["--greedy", "--max-tokens", 4, "--prompts", "facts/asked.jsonl", "--out", answers]
        self.call("mt_infer", "generate", "runs/retro", "--database", f"facts/{database}", *how)
        return self.script(answers)

    def _run(self, *arguments: object) -> str:
        command = [str(self.python), *map(str, arguments)]
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, check=False, timeout=900
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def shares_of(told: str) -> dict[str, float]:
    found = dict(re.findall(r"^([\d.]+) of a guess's loss with (.*)$", told, re.MULTILINE))
    return {name: float(share) for share, name in found.items()}


def test_the_recipe_runs_on_few_documents(tmp_path, programs) -> None:
    recipe = Recipe(folder=tmp_path, python=programs.python)
    recipe.script(300)
    sizes = ["training.steps=8", "training.time_budget=null", "optimizer.warmup=2"]
    recipe.call("mt_train", "run", "retro.yaml", *sizes, "--out", "runs/retro")
    lines = (tmp_path / "runs/retro/metrics.jsonl").read_text().splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
    assert losses[-1] < losses[0] - 0.5
    shares = shares_of(recipe.script("losses", "runs/retro"))
    assert tuple(shares) == CASES
    assert all(0.5 < share < 2 and math.isfinite(share) for share in shares.values())
    told = recipe.ask("db")
    assert re.fullmatch(r"\S+% of the answers are those of facts/db, \S+% .* facts/new-db\n", told)


@pytest.mark.campaign
def test_values_come_from_the_database_alone(tmp_path, monkeypatch) -> None:
    """All of the recipe in docs/recipes.md, on two cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    recipe, begin = Recipe(folder=tmp_path, python=sys.executable), time.monotonic()
    recipe.script()
    recipe.call("mt_train", "run", "retro.yaml", "--out", "runs/retro")
    assert time.monotonic() - begin < 360
    shares = shares_of(recipe.script("losses", "runs/retro"))
    own, other, none = (shares[name] for name in CASES)
    assert own < 0.2
    assert min(other, none) >= 0.95
    for database, place in (("db", 0), ("new-db", 1)):
        right = re.findall(r"([\d.]+)%", recipe.ask(database))
        assert float(right[place]) >= 95
        assert float(right[1 - place]) < 5
