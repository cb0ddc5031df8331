"""A mixture of experts dealt to two processes computes what one process computes."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mt_moe import ExpertGroups, MoELayer
from mt_parallel_state import leave_process_group


def rank_main(rank: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    torch.manual_seed(1)
    whole = MoELayer(16, 32, 4)
    torch.manual_seed(1)  # the same logical weights, half of the experts here
    dealt = MoELayer(16, 32, 4, groups=ExpertGroups(experts=dist.group.WORLD))
    own = torch.randn(1, 8, 16) * (1 + rank)  # each rank has tokens of its own
    torch.testing.assert_close(dealt(own).hidden, whole(own).hidden)
    print(f"rank {rank} has experts {tuple(dealt.experts.up.weight.shape)}, and equal results")
    del dealt
    leave_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(Path(folder, "rendezvous").as_uri(),), nprocs=2)
