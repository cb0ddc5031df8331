"""Print how many times as slow this machine is as the one that the check's limit is of.

    python tools/slowness.py

The check asks before and after its work: the speed of a machine that others use too changes while
it runs.
"""

import subprocess
import sys
import time

# What tests do: start a process, import torch, run Python, and many small operations.
PROBE = """
import torch
torch.set_num_threads(1)
x = torch.ones(32, 32)
for _ in range(100_000):
    x = (x @ x).tanh()
sum(i * i for i in range(3_000_000))
"""
PROBE_SECONDS = 1.9  # on the machine that the limit is of


def slowness() -> float:
    """Return how many times as long as there the probe takes here, two at once; at least 1."""

    def seconds() -> float:
        started = time.perf_counter()
        both = [subprocess.Popen([sys.executable, "-c", PROBE]) for _ in range(2)]
        if [process.wait() for process in both] != [0, 0]:
            raise SystemExit("the probe of the machine's speed failed; its error is above")
        return time.perf_counter() - started

    return max(1.0, min(seconds() for _ in range(3)) / PROBE_SECONDS)


if __name__ == "__main__":
    print(f"{slowness():.2f}")
