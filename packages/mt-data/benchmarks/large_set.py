"""What the first and the next process of a node need for a sample of a large data set.

    python large_set.py [DOCUMENTS]

The index is drawn and the `.bin` is empty space, so no tokens are written. Each process is a new
one and prints the CPU-seconds, the time and the memory (of its own, and shared with others) that
opening the data set and reading a sample add to those of the imports.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from mt_data import GPTDataset, IndexedDataset
from mt_data.storage.index import Index

MIB = 1 << 20


def write_set(prefix: Path, documents: int) -> None:
    """Write the index of documents of 600 tokens on average, and a `.bin` of that size."""
    lengths = np.random.default_rng(0).integers(1, 1200, documents, dtype=np.int32)
    index = Index.build(np.uint16, lengths, np.arange(documents + 1))
    prefix.with_suffix(".idx").write_bytes(index.to_bytes())
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(2 * int(lengths.sum(dtype=np.int64)))
    old = time.time() - 60
    os.utime(prefix.with_suffix(".idx"), (old, old))


def memory() -> dict[str, float]:
    """Return this process's memory in MiB: its own, its peak, and what it maps of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = dict(line.split(":", 1) for line in lines if line.endswith(" kB"))
    names = {"own": "RssAnon", "peak": "VmHWM", "shared": "RssFile"}
    return {name: int(sizes[key].split()[0]) / 1024 for name, key in names.items()}


def start(prefix: Path) -> None:
    """Open the data set, read a sample, and print what it took."""
    before, wall, cpu = memory(), time.perf_counter(), time.process_time()
    dataset = IndexedDataset(prefix)
    samples = GPTDataset(
        dataset, sequence_length=4096, seed=1, order_folder=prefix.with_name("orders")
    )
    samples.sample(7)
    took = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
    print(json.dumps(took | {name: size - before[name] for name, size in memory().items()}))


def main() -> None:
    """Print a row for each process."""
    if len(sys.argv) > 2:
        start(Path(sys.argv[2]))
        return
    documents = int(sys.argv[1]) if len(sys.argv) > 1 else 2 * 10**7
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder, "set")
        write_set(prefix, documents)
        time.sleep(3)  # a file that changed just now is not remembered
        print(f"{documents} documents, {prefix.with_suffix('.idx').stat().st_size / MIB:.0f} MiB")
        print(f"{'process':8} {'CPU s':>7} {'wall s':>7} {'own MiB':>8} {'peak':>7} {'shared':>7}")
        for number in range(1, 6):
            command = [sys.executable, __file__, "start", str(prefix)]
            done = subprocess.run(  # noqa: S603 - this file
                command, check=True, capture_output=True, text=True
            )
            row = json.loads(done.stdout)
            print(
                f"{number:<8} {row['cpu']:7.2f} {row['wall']:7.2f} {row['own']:8.1f} "
                f"{row['peak']:7.0f} {row['shared']:7.0f}"
            )


if __name__ == "__main__":
    main()
