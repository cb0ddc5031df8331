"""What the data sets of a run cost, beside other libraries: all in one run, in CPU-seconds.

    OMP_NUM_THREADS=1 python goals.py [--rounds 5] [--megabytes 100] [--megatron PYTHON] [--out F]

Each measurement is a process of its own, and what is compared takes turns. `--megatron` is an
interpreter that has megatron-core and torch beside mt-data; without it those rows are left out.
Ratios are of speeds: above 1 mt-data is faster; the median, and the lowest and the highest round.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from build_corpus import write_lines
from large_set import write_set
from mt_data import (
    BatchSampler,
    GPTDataset,
    IndexedDataset,
    IndexedWriter,
    Rows,
    SplitOrder,
    best_fit,
    build_corpus,
    read_documents,
)
from mt_tokenizer import Encoder, load_tokenizer, train_tokenizer
from mt_tokenizer.fast import FastEncoder, fast_encoder

LENGTH, BATCH, STEPS = 4096, 4, 400


def timed(action: Callable[[], object]) -> float:
    """Return the CPU-seconds of an action, on all threads of this process."""
    begin = time.process_time()
    action()
    return time.process_time() - begin


def build(folder: str, lines: str, name: str) -> dict[str, Any]:
    """Build a data set twice with one encoder: the second finds the caches of words warm."""
    tokenizer = load_tokenizer(Path(folder, f"{Path(lines).stem}.json"))
    out, spent = Path(folder, name), []
    encoder = Encoder(tokenizer, fast=False if name == "tokenizers" else None)
    fast = None if name != "gigatoken" else FastEncoder(tokenizer.engine)

    def ours() -> None:
        build_corpus(read_documents(lines), out, tokenizer, encoder=encoder, overwrite=True)

    def theirs() -> None:
        import awkward
        import gigatoken

        assert fast is not None
        rows = fast._inner.encode_files(gigatoken.JsonlFileSource([lines]))
        counts = awkward.to_numpy(awkward.num(rows)).astype(np.int64)
        ids = awkward.to_numpy(awkward.flatten(rows)).astype(np.uint16)
        ids = np.insert(ids, np.cumsum(counts), tokenizer.eod_id)
        with IndexedWriter(out, np.uint16, overwrite=True) as writer:
            writer.add_documents(ids, counts + 1)

    for _ in range(2 if name != "tokenizers" else 1):
        spent.append(timed(ours if fast is None else theirs))
    digest = hashlib.sha256(Path(f"{out}.bin").read_bytes()).hexdigest()
    return {"cpu": spent, "sha256": digest, "library": "gigatoken" if fast else encoder.library}


def start(folder: str) -> dict[str, Any]:
    """Open a large set in a process of its own, as another rank of the node."""
    script = Path(__file__).with_name("large_set.py")
    command = [sys.executable, str(script), "start", str(Path(folder, "set"))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
    return json.loads(done.stdout)


def epoch_end(folder: str) -> dict[str, Any]:
    """Time the samples around the end of an epoch, the middle of which was read a while ago."""
    prefix = Path(folder, "set")
    samples = GPTDataset(
        IndexedDataset(prefix), sequence_length=LENGTH, seed=2, order_folder=prefix.parent / "own"
    )
    count = len(samples)
    samples.sample(count // 2 + 1)  # from here on a thread makes the next epoch's order
    time.sleep(30)
    took = []
    for index in range(count - 200, count + 200):
        begin = time.perf_counter()
        samples.sample(index)
        took.append(time.perf_counter() - begin)
    return {"first": took[200], "median": statistics.median(took), "most": max(took)}


def blend() -> dict[str, Any]:
    """Find samples around the 10^9th of a blend of 256 data sets."""
    order = SplitOrder(np.random.default_rng(0).lognormal(0, 2, 256))
    took = []
    for index in range(10**9, 10**9 + 2000):
        begin = time.perf_counter()
        order(index)
        took.append((time.perf_counter() - begin) * 1e6)
    first = SplitOrder(np.random.default_rng(1).lognormal(0, 2, 256))
    cold = timed(lambda: first(10**9)) * 1e6
    return {"us": statistics.quantiles(took, n=100)[49::49], "first_us": cold}


def plan() -> dict[str, Any]:
    """Plan rows of a million lengths."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(650), 0.8, 10**6), 1, LENGTH).astype(np.int64)
    rows: list[Any] = []
    cpu = timed(lambda: rows.extend(best_fit(lengths, LENGTH)))
    return {"cpu": cpu, "fill": float(lengths.sum() / len(rows) / LENGTH)}


def loader(folder: str, who: str, packed: str) -> dict[str, Any]:
    """Read batches of whole rows, as tensors."""
    import torch

    prefix = Path(folder, "train")
    if who == "mt":
        dataset = GPTDataset(IndexedDataset(prefix), sequence_length=LENGTH, seed=1)
        how = {"global_batch_size": BATCH, "micro_batch_size": BATCH}
        rows = Rows(packing="documents" if packed == "packed" else "none")
        sampler = BatchSampler(dataset, **how).with_rows(rows)

        def read() -> None:
            for step in range(STEPS):
                for batch in sampler.step(step % len(sampler)):
                    for array in batch.values():
                        torch.from_numpy(array)

    else:
        batches = _megatron(prefix, Path(folder), is_packed=packed == "packed")

        def read() -> None:
            for _, _batch in zip(range(STEPS), batches, strict=False):
                pass

    return {"cpu": timed(read) / STEPS / BATCH * 1e6}


def _megatron(prefix: Path, folder: Path, *, is_packed: bool) -> Any:
    """Return megatron-core's data set under torch's DataLoader."""
    import torch
    from megatron.core.datasets.gpt_dataset import GPTDataset as Theirs
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset as Indexed
    from megatron.core.datasets.utils import Split

    class Words:
        eod, pad, unique_identifiers = 0, 1, {"class": "Words"}
        vocab_size = 50_000

    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=LENGTH,
        blend=([str(prefix)], None),
        split="1,0,0",
        path_to_cache=str(folder / "cache"),
        tokenizer=Words(),
        reset_position_ids=is_packed,
        reset_attention_mask=is_packed,
        eod_mask_loss=is_packed,
        create_attention_mask=False,
    )
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    indexed = Indexed(str(prefix), multimodal=False, mmap=True)
    documents = np.arange(len(indexed), dtype=np.int32)
    number = (STEPS + 1) * BATCH
    dataset = Theirs(indexed, str(prefix), documents, number, Split.train, config)
    return torch.utils.data.DataLoader(dataset, batch_size=BATCH, num_workers=0)


class Runs:
    """Starts measurements as processes of this file."""

    def __init__(self, folder: Path, megatron: str | None) -> None:
        self.folder, self.megatron = folder, megatron

    def __call__(self, what: str, *arguments: str) -> dict[str, Any]:
        """Run a measurement, and return what it printed."""
        python = self.megatron if self.megatron and "megatron" in arguments else sys.executable
        given = [] if what in ("blend", "plan") else [str(self.folder)]
        command = [python, "-W", "ignore", __file__, "--measure", what, *given, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            raise SystemExit(f"{what} {arguments}: {done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1])


def spread(values: list[float]) -> dict[str, float]:
    """Return the median, the lowest and the highest of some values."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def prepare(folder: Path, megabytes: int) -> None:
    """Write the measurements."""
    for pattern, size in (("gpt2", megabytes), ("code", max(megabytes // 4, 1))):
        lines = folder / f"{pattern}.jsonl"
        write_lines(lines, size)
        texts = [each.text for each, _ in zip(read_documents(lines), range(300), strict=False)]
        tokenizer = train_tokenizer(texts, 8192, pattern=pattern)
        tokenizer.save(folder / f"{pattern}.json")
        fast_encoder(tokenizer.engine)  # the verdict is kept
    draw = np.random.default_rng(0)
    with IndexedWriter(folder / "train", np.uint16) as writer:
        for _ in range(4000):
            tokens = draw.integers(1, 50_000, max(int(draw.lognormal(6.5, 1)), 2))
            tokens[-1] = 0
            writer.add_document(tokens)


def rows_of(runs: Runs, rounds: int) -> dict[str, Any]:
    """Measure everything, in turns."""
    found: dict[str, list[dict[str, Any]]] = {}

    def take(name: str, what: str, *arguments: str) -> None:
        found.setdefault(name, []).append(runs(what, *arguments))
        print(name, found[name][-1], flush=True)

    start(str(runs.folder))  # the first rank of the node makes the order
    for _ in range(rounds):
        for name in ("mt", "gigatoken"):
            take(f"build {name}", "build", str(runs.folder / "gpt2.jsonl"), name)
        for name in ("mt", "tokenizers"):
            take(f"code {name}", "build", str(runs.folder / "code.jsonl"), name)
        take("blend", "blend")
        take("plan", "plan")
        take("start", "start")
        for packed in ("whole", "packed"):
            for who in ("mt", "megatron") if runs.megatron else ("mt",):
                take(f"loader {packed} {who}", "loader", who, packed)
    take("epoch end", "epoch_end")
    digests = {each["sha256"] for name in ("mt", "gigatoken") for each in found[f"build {name}"]}
    assert len(digests) == 1, "other tokens"

    def ratio(one: str, other: str, value: Callable[[dict[str, Any]], float]) -> dict[str, float]:
        pairs = zip(found[one], found[other], strict=True)
        return spread([value(b) / value(a) for a, b in pairs])

    result: dict[str, Any] = {
        "build / gigatoken's files": ratio("build mt", "build gigatoken", lambda x: x["cpu"][0]),
        "the same, warm": ratio("build mt", "build gigatoken", lambda x: x["cpu"][1]),
        "code / tokenizers": ratio("code mt", "code tokenizers", lambda x: x["cpu"][0]),
        "blend, us": spread([each["us"][0] for each in found["blend"]]),
        "blend, first, us": spread([each["first_us"] for each in found["blend"]]),
        "plan, s": spread([each["cpu"] for each in found["plan"]]),
        "second rank, s": spread([each["wall"] for each in found["start"]]),
        "second rank, CPU s": spread([each["cpu"] for each in found["start"]]),
        "second rank, MiB": spread([each["own"] for each in found["start"]]),
        "first sample of an epoch, s": found["epoch end"][0],
    }
    if runs.megatron:
        for packed in ("whole", "packed"):
            names = f"loader {packed} mt", f"loader {packed} megatron"
            result[f"loader, {packed}"] = ratio(*names, lambda x: x["cpu"])
    return {"rows": result, "rounds": found}


def main() -> None:
    """Measure, or be one of the measurements."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--documents", type=int, default=2 * 10**7)
    parser.add_argument("--megatron", help="interpreter with megatron-core")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        what, *arguments = options.measure
        measures = (build, start, epoch_end, blend, plan, loader)
        print(json.dumps({each.__name__: each for each in measures}[what](*arguments)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, options.megabytes)
        write_set(folder / "set", options.documents)
        time.sleep(3)  # a file that changed just now is not remembered
        report = rows_of(Runs(folder, options.megatron), options.rounds)
    for row, value in report["rows"].items():
        print(f"{row:32s} {json.dumps(value)}")
    if options.out is not None:
        about = {"date": time.strftime("%Y-%m-%d"), "python": sys.version.split()[0]}
        options.out.write_text(json.dumps({**about, **report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
