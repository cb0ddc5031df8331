"""A small Retro on real text: held-out bits per byte with its neighbours and without, by overlap.

    OMP_NUM_THREADS=2 python retro_text.py --out retro_text.json    # 9 minutes on two cores
    python retro_text.py --files 40 --seconds 5 --seeds 1           # whether it runs

The texts are sources of Python's standard library, of which a share is held out by content. The
commands are those of a user: mt-data build, mt-retro build and query, mt-train run with a YAML.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from environment import environment

EDGES = (0.0, 0.05, 0.125, 0.25, 0.5, 1.0)
YAML = """\
model:
  hidden_size: 192
  num_layers: 4
  num_heads: 6
  tied: true
  retro: {chunk: 64, neighbours: 2, encoder_layers: 1, first: 2, every: 2}
data:
  kind: retro
  train: [tokens/library]
  validation: tokens/library-validation
  tokenizer: tokens/library.tokenizer.json
  database: db
  neighbours: [near-train, near-held-out]
  overlap: OVERLAP
training:
  steps: 5000
  time_budget: SECONDS
  global_batch_size: 8
  micro_batch_size: 8
  sequence_length: 512
  dtype: fp32
optimizer: {lr: 3.0e-3, warmup: 30}
evaluation: {max_windows: null}
"""


def call(folder: Path, program: str, *arguments: object) -> None:
    """Run one of the commands in a folder."""
    command = [str(Path(sys.executable).with_name(program)), *map(str, arguments)]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)  # noqa: S603


def prepare(folder: Path, files: int, seconds: int) -> None:
    """Make tokens, a database of the training set, the neighbours of both sets, and the YAML."""
    from mt_data import standard_library_sources

    (folder / "texts").mkdir()
    found = standard_library_sources()
    step = max(1, len(found) // files)
    for number, path in enumerate(found[::step][:files]):
        shutil.copy(path, folder / "texts" / f"{number:04d}.py")
    how = ("--glob", "*.py", "--vocab-size", 4096, "--pattern", "code", "--held-out", 0.08)
    call(folder, "mt-data", "build", "texts", "--out", "tokens/library", *how)
    call(folder, "mt-retro", "build", "tokens/library", "--out", "db")
    for name, data in (("train", "library"), ("held-out", "library-validation")):
        call(folder, "mt-retro", "query", "db", "--data", f"tokens/{data}", "--out", f"near-{name}")
    text = YAML.replace("OVERLAP", str(list(EDGES[1:-1]))).replace("SECONDS", str(seconds))
    tokenizer = next((folder / "tokens").glob("library*tokenizer.json"))
    text = text.replace("tokens/library.tokenizer.json", str(tokenizer.relative_to(folder)))
    (folder / "retro.yaml").write_text(text)


def sizes(folder: Path, length: int = 512) -> dict[str, tuple[int, int]]:
    """Return the number of labels of each part of the held-out set, and of their bytes."""
    import numpy as np
    from mt_data import PADDING, IndexedDataset, dataset_tokenizer
    from mt_retro import Neighbours, RetroDataset

    near = Neighbours(folder / "near-held-out")
    rows = RetroDataset(near, sequence_length=length)
    parts: dict[str, tuple[float, float] | None] = {"all": None}
    parts |= {f"overlap_{low:g}_to_{high:g}": (low, high) for low, high in pairwise(EDGES)}
    bytes_of = dataset_tokenizer(IndexedDataset(folder / "tokens/library")).token_bytes
    found = {}
    for name, overlap in parts.items():
        kept = rows.changed(overlap=overlap)
        labels = np.concatenate([kept.row(number)["labels"] for number in range(len(kept))])
        labels = labels[labels != PADDING]
        found[name] = len(labels), int(bytes_of[labels].sum())
    return found


def train(folder: Path, seed: int) -> dict[str, Any]:
    """Train with one seed; return the steps and the held-out losses, in nats a token."""
    run = folder / "runs" / str(seed)
    call(folder, "mt-train", "run", "retro.yaml", f"training.seed={seed}", "--out", run)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if "val_loss" in record][-1]
    losses = {name: value for name, value in last.items() if name.endswith("_loss")}
    return {"seed": seed, "steps": last["step"], **losses}


def report(seeds: list[dict[str, Any]], counts: dict[str, tuple[int, int]]) -> list[dict[str, Any]]:
    """Return bits per byte of each part, with neighbours and without, for each seed."""
    rows = []
    for part, (labels, size) in counts.items():
        if not labels:
            continue
        name = "val" if part == "all" else f"val_{part}"
        row: dict[str, Any] = {"part": part, "labels": labels, "bytes": size}
        for key, ending in (("with", "_loss"), ("without", "_without_neighbours_loss")):
            losses = [seed[f"{name}{ending}"] for seed in seeds]
            row[key] = [loss * labels / size / math.log(2) for loss in losses]
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the report as Markdown."""
    total = rows[0]["bytes"]
    lines = [
        "| held-out text | share | with neighbours | masked | saved |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        ours, masked = mean(row["with"]), mean(row["without"])
        spread = f"{min(row['with']):.3f} to {max(row['with']):.3f}"
        share = f"{row['bytes'] / total:.1%}"
        saved = f"{1 - ours / masked:.1%}"
        lines.append(
            f"| {row['part']} | {share} | {ours:.3f} ({spread}) | {masked:.3f} | {saved} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Prepare, train every seed, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=300, help="of the standard library")
    parser.add_argument("--seconds", type=int, default=130, help="of training, for each seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, options.files, options.seconds)
        seeds = [train(folder, seed) for seed in range(1, options.seeds + 1)]
        rows = report(seeds, sizes(folder))
    print(table(rows))
    found = environment() | {"files": options.files, "seconds": options.seconds, "yaml": YAML}
    if options.out is not None:
        text = json.dumps(found | {"seeds": seeds, "bits per byte": rows}, indent=1)
        options.out.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
