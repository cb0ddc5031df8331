"""What check mode costs: an all-reduce with it against one without, side by side."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mt_parallel_state import CheckMode, ParallelLayout, ParallelState, leave_process_group

_RANKS, _ROUNDS, _CALLS = 2, 7, 50
_SIZES = (1_000, 1_000_000)


def _seconds(group: dist.ProcessGroup | None, x: torch.Tensor) -> float:
    dist.barrier()
    started = time.perf_counter()
    for _ in range(_CALLS):
        dist.all_reduce(x, group=group)
    return (time.perf_counter() - started) / _CALLS


def _measure(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=_RANKS)
    layout = ParallelLayout(tp=_RANKS)
    with ParallelState(layout) as plain, ParallelState(layout, check=CheckMode()) as checked:
        for size in _SIZES:
            x = torch.ones(size)
            pairs = []
            for _ in range(_ROUNDS):
                bare = _seconds(plain.group("tp"), x)
                pairs.append((_seconds(checked.group("tp"), x), bare))
            ratios = sorted(a / b for a, b in pairs)
            added = statistics.median(a - b for a, b in pairs)
            if rank == 0:
                print(
                    f"all-reduce of {size:,} fp32 over {_RANKS} ranks: checked / plain "
                    f"{statistics.median(ratios):.1f}x ({ratios[0]:.1f} to {ratios[-1]:.1f}), "
                    f"adds {added * 1e3:.2f} ms a call"
                )
    leave_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_measure, args=(Path(folder, "store").as_uri(),), nprocs=_RANKS)
