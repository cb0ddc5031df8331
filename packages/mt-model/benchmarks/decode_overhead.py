"""Python's share of decoding: this tree against another one, in alternating rounds.

    python packages/mt-model/benchmarks/decode_overhead.py --old TREE [--rounds 15] [--tokens 60]

A model of 12 layers of width 64 decodes one row on one thread, where products of matrices cost
less than the calls between them. Each tree runs in a process of its own, in its own environment
(`.venv`), and the two take turns. Prints processor time per token and the ratio of new over old
with its quartiles, and for each tree the Python calls of a token by cProfile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

WORKER = """
import cProfile, json, pstats, sys, time
import torch
from mt_model import GPT, gpt

torch.set_num_threads(1)
sizes = {"vocab_size": 256, "hidden_size": 64, "num_layers": 12, "num_heads": 4}
model = GPT(gpt(**sizes, max_sequence_length=1024), seed=0).eval()
prompt, token = torch.arange(16)[None], torch.ones(1, 1, dtype=torch.int64)

def decode(count):
    cache = model.new_cache(batch_size=1, max_length=512)
    with torch.inference_mode():
        model.logits(prompt, cache=cache)
        start = time.process_time()
        for _ in range(count):
            scores = model.logits(token, cache=cache)
        return time.process_time() - start, scores.sum().item()

decode(20)
for line in sys.stdin:
    if line.strip() == "calls":
        profile = cProfile.Profile()
        profile.runcall(decode, 20)
        calls = sum(v[1] for k, v in pstats.Stats(profile).stats.items() if k[0] != "~")
        print(json.dumps(calls / 20), flush=True)
    else:
        print(json.dumps(decode(int(line))), flush=True)
"""


def start(tree: Path) -> subprocess.Popen[str]:
    command = [str(tree / ".venv/bin/python"), "-c", WORKER]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603


def ask(worker: subprocess.Popen[str], line: str) -> object:
    assert worker.stdin
    assert worker.stdout
    worker.stdin.write(f"{line}\n")
    worker.stdin.flush()
    return json.loads(worker.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=60)
    options = parser.parse_args()
    new, old = start(Path(sys.prefix).parent), start(options.old.resolve())
    ratios, times = [], []
    for _ in range(options.rounds):
        (before, expected), (after, found) = (ask(x, str(options.tokens)) for x in (old, new))
        assert abs(found - expected) <= 1e-3 * max(1, abs(expected)), (found, expected)
        ratios.append(after / before)
        times.append((before, after))
    low, middle, high = statistics.quantiles(ratios, n=4)
    each = [1e3 * statistics.median(column) / options.tokens for column in zip(*times, strict=True)]
    print(f"ms per token: old {each[0]:.2f}, new {each[1]:.2f}")
    print(f"new / old: {middle:.3f} (quartiles {low:.3f} to {high:.3f})")
    calls = [ask(x, "calls") for x in (old, new)]
    print(f"Python calls per token: old {calls[0]:.0f}, new {calls[1]:.0f}")
    for worker in (old, new):
        worker.terminate()


if __name__ == "__main__":
    main()
