"""Make small checkpoints in the format version of this mt-ckpt, for the readers to come.

    uv run python packages/mt-ckpt/tests/golden/make_version.py

Run it once for each released format version, by the code of that release, and commit the folders:
one whose arrays are files, and one whose arrays are in packs.
"""

import os
from pathlib import Path

import torch
from mt_ckpt import TensorShard, grid, save_checkpoint
from mt_ckpt.manifest import FORMAT_VERSION
from mt_ckpt.stored import packing
from mt_files import ObjectStore
from mt_testing import unsteady_store

HERE = Path(__file__).parent
METADATA = {"layout": {"tp": 2}, "nested": [1, 2.5, None, True, "text"]}


def golden_arrays(version: int) -> dict[str, torch.Tensor]:
    """Return an array of each kind that a format version stores, made without random numbers."""
    values = torch.arange(24, dtype=torch.float64).reshape(6, 4) / 8 - 1
    arrays = {
        f"kinds/{str(dtype).removeprefix('torch.')}": values.to(dtype)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    }
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool):
        arrays[f"kinds/{str(dtype).removeprefix('torch.')}"] = (values * 8 % 7).to(dtype)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2) if version > 1 else ():
        arrays[f"kinds/{str(dtype).removeprefix('torch.')}"] = values.to(dtype)
    if version > 2:  # in slices
        arrays["model/sliced"] = torch.arange(16 * 24, dtype=torch.float32).reshape(16, 24)
    # Every bit pattern of a sign, an infinity and a NaN with a payload.
    patterns = torch.tensor([0, -32768, 32640, -128, 32703, 1], dtype=torch.int16)
    return arrays | {
        "model/layers.0.w": torch.arange(30, dtype=torch.float32).reshape(5, 6),
        "model/bits": patterns.view(torch.bfloat16),
        "step": torch.tensor(20),
        "empty": torch.zeros(0, 3),
    }


def golden_shards() -> list[TensorShard]:
    """Return the boxes of the arrays; matrices are in two of uneven sizes."""
    shards = []
    for name, tensor in golden_arrays(FORMAT_VERSION).items():
        if tensor.dim() < 2 or not len(tensor):
            shards.append(TensorShard(name, tensor))
            continue
        for start, part in ((0, tensor[:4]), (4, tensor[4:])):
            shards.append(TensorShard(name, part, global_shape=tensor.shape, offsets=(start, 0)))
    return shards


def save_through_store(name: str) -> None:
    """Save into an object store, as only a step there has version 4, and copy it to a folder."""
    root = f"s3://bucket/{name}"
    save_checkpoint(root, 20, golden_shards(), METADATA)
    store = ObjectStore(root)
    for info in store.list(name):
        if not info.path.endswith(".lock"):
            copy = HERE / info.path
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(store.get(info.path)[0])


if __name__ == "__main__":
    grid.SLICED_BYTES, grid.SLICE_BYTES, grid.MIN_SLICE_BYTES = 512, 128, 64
    with unsteady_store() as server:
        os.environ.update(server.variables)
        save_through_store(f"version_{FORMAT_VERSION}")
        packing.MIN_ARRAYS, packing.SMALL_BYTES = 0, 1000
        save_through_store(f"version_{FORMAT_VERSION}_packs")
