"""A mixture of experts dealt to two processes computes what one process computes.

python two_ranks.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mt_moe import ExpertGroups, MoELayer
from mt_parallel_state import leave_process_group


def rank_main(rank: int, world: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    torch.manual_seed(0)
    x = torch.randn(2, 8, 16, dtype=torch.float64)
    torch.manual_seed(1)
    whole = MoELayer(16, 32, 4, dtype=torch.float64)
    torch.manual_seed(1)  # the same logical weights, half of the experts here
    groups = ExpertGroups(experts=dist.group.WORLD)
    dealt = MoELayer(16, 32, 4, groups=groups, dtype=torch.float64)

    own = x[rank : rank + 1]  # each rank has tokens of its own
    error = (dealt(own).hidden - whole(own).hidden).abs().max().item()
    weight = tuple(dealt.experts.up.weight.shape)
    print(f"rank {rank}: experts.up.weight {weight}, largest difference {error:.1e}", flush=True)
    assert error < 1e-12
    del dealt, groups
    leave_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder, "rendezvous").as_uri()
        mp.spawn(rank_main, args=(2, address), nprocs=2)
