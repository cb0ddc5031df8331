"""An MLP split over two processes computes what the dense one computes.

python split_mlp.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from mt_parallel_state import gather_from_group, leave_process_group, scatter_to_group
from mt_tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn


class MLP(nn.Module):
    """Up, GELU, down; activations outside are split along the sequence."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(
            16, 64, group=group, sequence_parallel=True, dtype=torch.float64
        )
        self.down = RowParallelLinear(
            64, 16, group=group, sequence_parallel=True, dtype=torch.float64
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps this rank's part of the sequence."""
        return self.down(F.gelu(self.up(x)))


def rank_main(rank: int, world: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    group = dist.group.WORLD
    torch.manual_seed(0)
    x = torch.randn(2, 8, 16, dtype=torch.float64)

    torch.manual_seed(1)
    dense = MLP(None)
    torch.manual_seed(1)
    split = MLP(group)  # the same logical weights, half of them here

    own = scatter_to_group(x, group, dim=1)  # this rank's half of the sequence
    y = gather_from_group(split(own), group, dim=1)
    error = (y - dense(x)).abs().max().item()
    weight = tuple(split.up.weight.shape)
    print(f"rank {rank}: up.weight {weight}, largest difference to dense {error:.1e}", flush=True)
    assert error < 1e-12
    leave_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder, "rendezvous").as_uri()
        mp.spawn(rank_main, args=(2, address), nprocs=2)
