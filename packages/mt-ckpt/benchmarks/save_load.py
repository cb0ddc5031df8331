"""Saving and loading on one rank, against torch.save and against zarr-python's own writer.

    python packages/mt-ckpt/benchmarks/save_load.py

Prints times of this run and their ratios. All three end with the data synced to disk.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import zarr
from mt_ckpt import TensorShard, load_checkpoint, save_checkpoint
from zarr.codecs import Crc32cCodec

ROUNDS = 5
CASES = {"200 arrays of 64x64": (200, (64, 64)), "8 arrays of 4096x2048": (8, (4096, 2048))}
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


def save_torch(root: Path, tensors: Tensors) -> None:
    root.mkdir()
    torch.save(tensors, root / "t.pt")
    sync(root)


def load_torch(root: Path, tensors: Tensors) -> None:
    for name, tensor in torch.load(root / "t.pt").items():
        tensors[name].copy_(tensor)


def save_zarr(root: Path, tensors: Tensors) -> None:
    group = zarr.create_group(root)
    for name, tensor in tensors.items():
        group.create_array(name, data=tensor.numpy(), compressors=[Crc32cCodec()])
    sync(root)


def load_zarr(root: Path, tensors: Tensors) -> None:
    group = zarr.open_group(root, mode="r")
    for name, tensor in tensors.items():
        array = group[name]
        assert isinstance(array, zarr.Array)
        tensor.copy_(torch.from_numpy(array[...]))


def seconds(call: Callable[[Path, Tensors], None], root: Path, tensors: Tensors) -> float:
    start = time.perf_counter()
    call(root, tensors)
    return time.perf_counter() - start


def main() -> None:
    ways = {
        "mt-ckpt": (save_ours, load_ours),
        "torch.save": (save_torch, load_torch),
        "zarr-python": (save_zarr, load_zarr),
    }
    for case, (count, shape) in CASES.items():
        tensors = {f"model/layers.{i}.w": torch.randn(shape) for i in range(count)}
        empty = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, (save, load) in ways.items():
                with tempfile.TemporaryDirectory() as folder:
                    root = Path(folder) / "root"
                    saved = seconds(save, root, tensors)
                    times[way].append((saved, seconds(load, root, empty)))
        print(case)
        ours = [statistics.median(column) for column in zip(*times["mt-ckpt"], strict=True)]
        for way, pairs in times.items():
            medians = [statistics.median(column) for column in zip(*pairs, strict=True)]
            ratios = [value / own for value, own in zip(medians, ours, strict=True)]
            print(
                f"  {way:12} save {medians[0]:.3f} s ({ratios[0]:.2f} x ours), "
                f"load {medians[1]:.3f} s ({ratios[1]:.2f} x ours)"
            )


if __name__ == "__main__":
    main()
