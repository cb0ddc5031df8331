"""Saving and loading on one rank, against torch.save, safetensors and DCP.

    python packages/mt-ckpt/benchmarks/save_load.py --json

Prints medians and ranges of paired rounds: in each round every way saves and loads the same
tensors once. All ways end with the data synced to disk. `--megabytes 64 --arrays 1000` is quick.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from mt_ckpt import TensorShard, inspect_checkpoint, load_checkpoint, save_checkpoint

Tensors = dict[str, torch.Tensor]


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


def measure(
    tensors: Tensors, rounds: int, folder: Path | None
) -> dict[str, dict[str, list[float]]]:
    """Return seconds of each round, by way and action."""
    times = {way: {"save": [], "load": []} for way in WAYS} | {"mt-ckpt": {}}
    times["mt-ckpt"] = {"save": [], "load": [], "open": []}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--arrays", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; by default as tempfile does")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    cases = {
        f"{args.megabytes} MB": large(args.megabytes),
        f"{args.arrays} arrays of 64": small(args.arrays),
    }
    found = {case: measure(t, args.rounds, args.folder) for case, t in cases.items() if t}
    if args.json:
        print(json.dumps(found, indent=1))
        return
    for case, ways in found.items():
        print(case)
        for way, actions in ways.items():
            for action, column in actions.items():
                own = statistics.median(ways["mt-ckpt"][action])
                middle = statistics.median(column)
                print(
                    f"  {way:12} {action} {middle:.3f} s ({min(column):.3f} to "
                    f"{max(column):.3f}), {middle / own:.2f} x ours"
                )


if __name__ == "__main__":
    main()
