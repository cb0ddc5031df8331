"""What training in 8 or 4 bits costs the quickstart's model: bits per byte of held-out text.

    python tests-integration/benchmarks/precision.py [--steps 400] [--runs FOLDER] [--out FILE]
        [--recipes tensorwise blockwise]

Trains the quickstart's model in bf16 and with each recipe, over the same batches from the same
weights, and measures all on the held-out text as they learn.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mt_testing import environment, write_report

EVERY = 50  # steps between measurements


def train(folder: Path, steps: int, recipe: str | None) -> dict[int, float]:
    """Train a run that is not there yet; return held-out bits per byte by step."""
    if not (folder / "summary.json").exists():
        name = "null" if recipe is None else recipe
        command = [sys.executable, "-m", "mt_train", "quickstart", "--steps", str(steps)]
        command += ["--out", str(folder), "data.max_files=300", "training.dtype=bf16"]
        command += [f"evaluation.every={EVERY}", "evaluation.max_windows=128"]
        subprocess.run([*command, f"precision.recipe={name}"], check=True)  # noqa: S603 - our own
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["bits_per_byte"] for row in rows if "bits_per_byte" in row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--recipes", nargs="*", default=["tensorwise", "blockwise"])
    parser.add_argument("--runs", type=Path, help="where runs are kept, and found that have ended")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.runs or Path(scratch)
        for recipe in (None, *options.recipes):
            curve = train(folder / (recipe or "bf16"), options.steps, recipe)
            row: dict[str, Any] = {"recipe": recipe, "bits_per_byte": curve}
            if recipe is not None:
                ends = (each["bits_per_byte"][options.steps] for each in (row, results[0]))
                row["worse_by"] = next(ends) / next(ends) - 1
            results.append(row)
            print(recipe or "bf16", *(f"{step}:{bits:.4f}" for step, bits in curve.items()))
    report = environment("torch") | {"steps": options.steps, "results": results}
    write_report(options.out, report)


if __name__ == "__main__":
    main()
