"""Exact search beside faiss's Flat index: the same vectors, the same neighbours, one thread.

    OMP_NUM_THREADS=1 python exact_search.py [--rounds 5] [--out exact_search.json]

Prints CPU-seconds of a search and their ratios, round by round; mt-retro is faster if above 1.
"""

import argparse
import json
import os
import platform
import time
from datetime import UTC, datetime
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import faiss  # noqa: E402 - the number of threads comes first
import numpy as np  # noqa: E402
from mt_retro import exact_neighbours  # noqa: E402

KEYS, QUERIES, DIM, K = 60_000, 300, 256, 20


def drawn(clusters: int) -> np.ndarray:
    """Vectors in clusters, of length 1; the queries come last."""
    draw = np.random.default_rng(0)
    centres = draw.standard_normal((clusters, DIM))
    vectors = centres[draw.integers(0, clusters, KEYS + QUERIES)]
    vectors += 0.5 * draw.standard_normal(vectors.shape)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors.astype(np.float32)


def main() -> None:
    """Compare, round by round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    faiss.omp_set_num_threads(1)
    vectors = drawn(500)
    keys, queries = vectors[:KEYS], vectors[KEYS:]
    index = faiss.IndexFlatL2(DIM)
    index.add(keys)
    searches = {
        "faiss": lambda: index.search(queries, K)[1],
        "mt-retro": lambda: exact_neighbours(queries, keys, K)[0],
    }
    found = {name: search() for name, search in searches.items()}  # a round to warm up
    same = float((found["faiss"] == found["mt-retro"]).mean())
    rounds = []
    for _ in range(options.rounds):
        seconds = {}
        for name, search in searches.items():
            begin = time.process_time()
            search()
            seconds[name] = time.process_time() - begin
        rounds.append(seconds)
        ratio = seconds["faiss"] / seconds["mt-retro"]
        print(f"faiss {seconds['faiss']:.3f} s, mt-retro {seconds['mt-retro']:.3f} s: {ratio:.2f}x")
    ratios = sorted(each["faiss"] / each["mt-retro"] for each in rounds)
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "keys": KEYS,
        "queries": QUERIES,
        "dim": DIM,
        "k": K,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "faiss": faiss.__version__,
        "same ids": same,
        "rounds": rounds,
        "ratio": {"median": ratios[len(ratios) // 2], "low": ratios[0], "high": ratios[-1]},
    }
    print(f"median {report['ratio']['median']:.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    print(f"{same:.2%} of the ids are the same")
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
