"""Saving and loading, against torch.save, safetensors and DCP, on one rank and on two.

    python packages/mt-ckpt/benchmarks/save_load.py --json

Prints medians and ranges of paired rounds: in each round every way saves and loads the same
tensors once. All ways end with the data synced to disk. A save in the background is measured by
the time for which it blocks the caller, beside a copy of the state into warm buffers. Peak memory
is what a save, and a load, add to the resident set. `--megabytes 64 --arrays 1000` is quick.
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from mt_ckpt import (
    BackgroundSaver,
    TensorShard,
    inspect_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

Tensors = dict[str, torch.Tensor]
Times = dict[str, dict[str, list[float]]]  # seconds of each round, by way and action


def sync(path: Path) -> None:
    for file in [path, *path.rglob("*")]:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def save_ours(root: Path, tensors: Tensors) -> None:
    save_checkpoint(root, 1, [TensorShard(n, t) for n, t in tensors.items()], {})


def load_ours(root: Path, tensors: Tensors) -> None:
    load_checkpoint(root / "step_00000001", [TensorShard(n, t) for n, t in tensors.items()])


def open_ours(root: Path, _: Tensors) -> None:
    inspect_checkpoint(root / "step_00000001")


def save_torch(root: Path, tensors: Tensors) -> None:
    root.mkdir()
    torch.save(tensors, root / "t.pt")
    sync(root)


def load_torch(root: Path, tensors: Tensors) -> None:
    for name, tensor in torch.load(root / "t.pt").items():
        tensors[name].copy_(tensor)


def save_safetensors(root: Path, tensors: Tensors) -> None:
    root.mkdir()
    safetensors.torch.save_file(tensors, root / "t.safetensors")
    sync(root)


def load_safetensors(root: Path, tensors: Tensors) -> None:
    for name, tensor in safetensors.torch.load_file(root / "t.safetensors").items():
        tensors[name].copy_(tensor)


def save_dcp(root: Path, tensors: Tensors) -> None:
    dcp.save(tensors, checkpoint_id=root, no_dist=True)
    sync(root)


def load_dcp(root: Path, tensors: Tensors) -> None:
    dcp.load(tensors, checkpoint_id=root, no_dist=True)


WAYS = {
    "mt-ckpt": (save_ours, load_ours),
    "torch.save": (save_torch, load_torch),
    "safetensors": (save_safetensors, load_safetensors),
    "DCP": (save_dcp, load_dcp),
}


def seconds(call: Callable[[Path, Tensors], None], root: Path, tensors: Tensors) -> float:
    start = time.perf_counter()
    call(root, tensors)
    return time.perf_counter() - start


def large(megabytes: int) -> Tensors:
    """Return bf16 weights and two fp32 moments, as a training run has."""
    count = max(1, megabytes * 10**6 // (10 * 1024 * 1024))
    tensors: Tensors = {}
    for layer in range(count):
        weight = torch.randn(1024, 1024)
        tensors[f"model/layers.{layer}.w"] = weight.bfloat16()
        tensors[f"optimizer/exp_avg/layers.{layer}.w"] = weight
        tensors[f"optimizer/exp_avg_sq/layers.{layer}.w"] = weight.square()
    return tensors


def small(count: int) -> Tensors:
    return {f"model/layers.{i // 10}.p{i % 10}": torch.randn(64) for i in range(count)}


def measure(tensors: Tensors, rounds: int, folder: Path | None) -> Times:
    times: Times = {way: {"save": [], "load": []} for way in WAYS}
    times["mt-ckpt"]["open"] = []
    filled = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for _ in range(rounds):
        for way, (save, load) in WAYS.items():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                root = Path(scratch) / "root"
                times[way]["save"].append(seconds(save, root, tensors))
                times[way]["load"].append(seconds(load, root, filled))
                if way == "mt-ckpt":
                    times[way]["open"].append(seconds(open_ours, root, filled))
            assert all(torch.equal(filled[name], tensor) for name, tensor in tensors.items())
    return times


def halves(tensors: Tensors, rank: int) -> tuple[list[TensorShard], dict[str, DTensor]]:
    """Return the half of each tensor that a rank of two holds, as a shard and as a DTensor."""
    mesh = init_device_mesh("cpu", (2,))
    shards, state = [], {}
    for name, tensor in tensors.items():
        part = tensor.chunk(2)[rank].clone()
        offsets = (rank * len(part), *[0] * (tensor.dim() - 1))
        shards.append(TensorShard(name, part, global_shape=tuple(tensor.shape), offsets=offsets))
        state[name] = DTensor.from_local(part, mesh, [Shard(0)])
    return shards, state


def on_two_ranks(rank: int, folder: Path, megabytes: int, rounds: int) -> None:
    """Save and load by mt-ckpt and DCP on one of two ranks; rank 0 writes the seconds."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    shards, state = halves(large(megabytes), rank)
    group = dist.group.WORLD
    step, columns = "step_00000001", ("save", "load")
    ways = {
        "mt-ckpt": (
            lambda root: save_checkpoint(root, 1, shards, {}, group=group),
            lambda root: load_checkpoint(root / step, shards, group=group),
        ),
        "DCP": (
            lambda root: (dcp.save(state, checkpoint_id=root), rank or sync(root)),
            lambda root: dcp.load(state, checkpoint_id=root),
        ),
    }
    times: dict[str, dict[str, list[float]]] = {way: {c: [] for c in columns} for way in ways}
    for turn in range(rounds):
        for way, calls in ways.items():
            for column, call in zip(columns, calls, strict=True):
                dist.barrier()
                start = time.perf_counter()
                call(folder / f"{way}{turn}")
                dist.barrier()
                times[way][column].append(time.perf_counter() - start)
    if rank == 0:
        (folder / "times.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def measure_two_ranks(megabytes: int, rounds: int, folder: Path | None) -> Times:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        mp.spawn(on_two_ranks, (Path(scratch), megabytes, rounds), nprocs=2)
        return json.loads((Path(scratch) / "times.json").read_text())


def measure_blocked(tensors: Tensors, rounds: int, folder: Path | None) -> Times:
    """Return the seconds of a save, of the block by one in the background, and of a warm copy."""
    copies = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    columns: dict[str, list[float]] = {"save": [], "blocked": [], "copy": []}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        root = Path(scratch)
        with BackgroundSaver(root / "background", keep=1) as saver:
            for turn in range(rounds + 1):
                shards = [TensorShard(name, tensor) for name, tensor in tensors.items()]
                start = time.perf_counter()
                saver.save(turn, shards, {})
                blocked = time.perf_counter() - start
                saver.wait()
                whole = seconds(save_ours, root / f"whole{turn}", tensors)
                start = time.perf_counter()
                for name, tensor in tensors.items():
                    copies[name].copy_(tensor)
                copied = time.perf_counter() - start
                if turn:  # the first one makes the buffers
                    for column, value in zip(columns, (whole, blocked, copied), strict=True):
                        columns[column].append(value)
    return {"mt-ckpt": columns}


@contextmanager
def peak() -> Iterator[list[float]]:
    """Yield a list that gets the MB by which the resident set grew at most during the block."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, resident())

    found: list[float] = []
    before, done = resident(), threading.Event()
    most = before
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
        found.append(round((most - before) / 1e6, 1))


def note_peak(_: int, megabytes: int, folder: Path) -> None:
    """Write what a save, and a load, add to the resident set of a new process, in MB."""
    tensors = large(megabytes)
    filled = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    save_ours(folder / "first", small(10))  # imports what a save imports
    with peak() as saved:
        save_ours(folder / "root", tensors)
    with peak() as loaded:
        load_ours(folder / "root", filled)
    (folder / "peak.json").write_text(json.dumps({"save": saved[0], "load": loaded[0]}))


def measure_peak(megabytes: int, folder: Path | None) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        mp.spawn(note_peak, (megabytes, Path(scratch)), nprocs=1)
        return json.loads((Path(scratch) / "peak.json").read_text())


def measure_open(count: int, rounds: int, folder: Path | None) -> Times:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        root = Path(scratch) / "root"
        save_ours(root, small(count))
        return {"mt-ckpt": {"open": [seconds(open_ours, root, {}) for _ in range(rounds)]}}


def show(times: Times) -> None:
    for way, actions in times.items():
        for action, column in actions.items():
            own = statistics.median(times["mt-ckpt"][action])
            middle = statistics.median(column)
            print(
                f"  {way:12} {action} {middle:.3f} s ({min(column):.3f} to "
                f"{max(column):.3f}), {middle / own:.2f} x ours"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--arrays", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; by default as tempfile does")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    size, rounds, folder = f"{args.megabytes} MB", args.rounds, args.folder
    state = large(args.megabytes)
    cases: dict[str, Callable[[], Times]] = {
        size: partial(measure, state, rounds, folder),
        f"{size}, 2 ranks": partial(measure_two_ranks, args.megabytes, rounds, folder),
        f"{size}, in the background": partial(measure_blocked, state, rounds, folder),
        f"{args.arrays} arrays of 64": partial(measure, small(args.arrays), rounds, folder),
        f"{10 * args.arrays} arrays of 64": partial(measure_open, 10 * args.arrays, rounds, folder),
    }
    found: dict[str, Times | dict[str, float]] = {}
    for case, run in cases.items():
        found[case] = times = run()
        if not args.json:
            print(case)
            show(times)
    found[f"{size}, peak MB"] = peaks = measure_peak(args.megabytes, folder)
    print(json.dumps(found, indent=1) if args.json else f"{size}, peak MB: {peaks}")


if __name__ == "__main__":
    main()
