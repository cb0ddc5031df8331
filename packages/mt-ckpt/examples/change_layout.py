"""Save from two ranks that hold halves of a matrix, load into four ranks that hold quarters.

python packages/mt-ckpt/examples/change_layout.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import zarr
from mt_ckpt import latest_checkpoint, load_checkpoint, param_shards, save_checkpoint
from mt_parallel_state import ParallelLayout, PartitionSpec, leave_process_group, shard_param

WHOLE = torch.arange(32.0).reshape(8, 4)


def make_params(layout: ParallelLayout, rank: int) -> dict[str, torch.nn.Parameter]:
    weight = torch.zeros(8 // layout.tp, 4)
    bias = torch.zeros(4)
    return {
        "linear.weight": shard_param(torch.nn.Parameter(weight), PartitionSpec("tp")),
        "linear.bias": torch.nn.Parameter(bias),  # unmarked: replicated
    }


def save(rank: int, world_size: int, folder: str) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store{world_size}", world_size),
        rank=rank,
        world_size=world_size,
    )
    layout = ParallelLayout(tp=world_size)
    params = make_params(layout, rank)
    with torch.no_grad():
        params["linear.weight"].copy_(WHOLE.chunk(world_size)[rank])
    shards = param_shards(params.items(), layout, rank, prefix="model")
    path = save_checkpoint(
        f"{folder}/checkpoints", 20, shards, {"consumed_samples": 640}, group=dist.group.WORLD
    )
    if rank == 0:
        print(f"saved {path.name} on {world_size} ranks")
    leave_process_group()


def load(rank: int, world_size: int, folder: str) -> None:
    layout = ParallelLayout(tp=world_size)
    params = make_params(layout, rank)
    path = latest_checkpoint(f"{folder}/checkpoints")
    assert path is not None
    shards = param_shards(params.items(), layout, rank, prefix="model")
    metadata = load_checkpoint(path, shards)
    assert torch.equal(params["linear.weight"], WHOLE.chunk(world_size)[rank])
    print(
        f"rank {rank} of {world_size} has rows {shards[0].offsets[0]} to "
        f"{shards[0].offsets[0] + 8 // world_size - 1}; {metadata}"
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(save, args=(2, folder), nprocs=2)
        for rank in range(4):
            load(rank, 4, folder)
        array = zarr.open_group(Path(folder) / "checkpoints/step_00000020")["model/linear.weight"]
        print("zarr-python sees", array)


if __name__ == "__main__":
    main()
