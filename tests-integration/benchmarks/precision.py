"""What training in 8 or 4 bits costs the quickstart's model: bits per byte of held-out text.

    python tests-integration/benchmarks/precision.py [--steps 400] [--runs FOLDER] [--out FILE]
        [--recipes tensorwise blockwise] [--seeds 1 2]

Trains the quickstart's model in bf16 and with each recipe, over the same batches from the same
weights, and measures all on the held-out text as they learn. Runs that differ by roundings alone
part too: `halves` is bf16 once more, with a batch in two micro-batches, for the first seed.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mt_testing import environment, write_report

EVERY = 50  # steps between measurements
CHANGES = {"bf16": [], "halves": ["training.micro_batch_size=4"]}


def train(folder: Path, steps: int, recipe: str, seed: int) -> dict[int, float]:
    """Train a run that is not there yet; return held-out bits per byte by step."""
    if not (folder / "summary.json").exists():
        changes = CHANGES.get(recipe, [f"precision.recipe={recipe}"])
        command = [sys.executable, "-m", "mt_train", "quickstart", "--steps", str(steps)]
        command += ["--out", str(folder), "data.max_files=300", "training.dtype=bf16"]
        command += [f"evaluation.every={EVERY}", "evaluation.max_windows=128"]
        command += [f"training.seed={seed}", *changes]
        subprocess.run(command, check=True)  # noqa: S603 - our own command
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["bits_per_byte"] for row in rows if "bits_per_byte" in row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--recipes", nargs="*", default=["tensorwise", "blockwise"])
    parser.add_argument("--seeds", nargs="*", type=int, default=[1234, 1, 2])
    parser.add_argument("--runs", type=Path, help="where runs are kept, and found that have ended")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    runs = list(itertools.product(options.seeds, ("bf16", *options.recipes)))
    runs.append((options.seeds[0], "halves"))
    curves: dict[str, dict[int, dict[int, float]]] = {name: {} for _, name in runs}
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.runs or Path(scratch)
        for seed, name in runs:
            curve = train(folder / f"{name}-{seed}", options.steps, name, seed)
            curves[name][seed] = curve
            print(name, seed, *(f"{step}:{bits:.4f}" for step, bits in curve.items()), flush=True)
    results: list[dict[str, Any]] = []
    for name, by_seed in curves.items():
        ends = {seed: curve[options.steps] for seed, curve in by_seed.items()}
        worse = [end / curves["bf16"][seed][options.steps] - 1 for seed, end in ends.items()]
        mean = statistics.fmean(worse)
        results.append({"recipe": name, "worse_by": worse, "mean": mean, "curves": by_seed})
        print(f"{name:12} {mean:+.2%}", *(f"{each:+.2%}" for each in worse))
    report = environment("torch") | {"steps": options.steps, "results": results}
    write_report(options.out, report)


if __name__ == "__main__":
    main()
