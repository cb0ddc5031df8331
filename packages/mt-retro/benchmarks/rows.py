"""A loader's rows with neighbours beside rows without them, and beside rows of packed text.

    OMP_NUM_THREADS=1 python rows.py [--rounds 7] [--length 2048] [--out rows.json]

Prints microseconds of processor time for a row of a batch of four, and ratios, round by round.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402 - the number of threads comes first
from mt_data import BatchSampler, GPTDataset, IndexedDataset, IndexedWriter, Rows  # noqa: E402
from mt_retro import NGramEmbedding, RetroDataset, build_database, find_neighbours  # noqa: E402

DOCUMENTS, VOCABULARY, BATCH, STEPS = 2000, 50_000, 4, 300


def made(folder: Path, length: int) -> dict[str, BatchSampler]:
    """Write documents of random tokens and lengths, and return samplers of their rows."""
    draw = np.random.default_rng(0)
    for name in ("library", "train"):
        with IndexedWriter(folder / name, np.uint16) as writer:
            for _ in range(DOCUMENTS):
                size = int(draw.lognormal(6.5, 1))
                writer.add_document(draw.integers(0, VOCABULARY, size))
    database = build_database([folder / "library"], folder / "db", embedding=NGramEmbedding(16))
    train = IndexedDataset(folder / "train")
    near = find_neighbours(database, train, folder / "near", neighbours=2)
    assert near is not None
    rows = RetroDataset(near, sequence_length=length)
    datasets = {
        "text": GPTDataset(train, sequence_length=length),
        "without": rows.changed(retrieves=False),
        "with": rows,
    }
    how = {"global_batch_size": BATCH, "micro_batch_size": BATCH}
    packed = Rows(packing="documents")
    return {name: BatchSampler(each, **how).with_rows(packed) for name, each in datasets.items()}


def main() -> None:
    """Compare, round by round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        samplers = made(Path(folder), options.length)
        for _ in range(options.rounds + 1):  # the first one warms up
            spent = {}
            for name, sampler in samplers.items():
                begin = time.process_time()
                for step in range(STEPS):
                    sampler.step(step % len(sampler))
                spent[name] = (time.process_time() - begin) / STEPS / BATCH * 1e6
            rounds.append(spent)
            print(", ".join(f"{name} {value:.0f} us" for name, value in spent.items()))
    ratios = {}
    for name in ("without", "text"):
        found = sorted(each["with"] / each[name] for each in rounds[1:])
        ratios[name] = {"median": found[len(found) // 2], "low": found[0], "high": found[-1]}
        print(f"with neighbours / {name}: {ratios[name]['median']:.2f}x")
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "length": options.length,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "rounds": rounds[1:],
        "ratio": ratios,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
