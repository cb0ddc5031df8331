"""Ring attention over two processes, on a plain tensor, equals attention on one.

python ring_attention.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from mt_context_parallel import context_parallel_attention, shard, unshard
from mt_parallel_state import leave_process_group


def rank_main(rank: int, world: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    group = dist.group.WORLD
    torch.manual_seed(0)
    q = torch.randn(2, 64, 8, 16, dtype=torch.float64)  # [batch, tokens, heads, head_dim]
    k, v = torch.randn(2, 2, 64, 4, 16, dtype=torch.float64)  # two query heads share a key head

    own = [shard(x, group).requires_grad_() for x in (q, k, v)]  # this rank's half of the tokens
    out = context_parallel_attention(*own, group=group, algorithm="ring")
    out.sum().backward()

    whole = [x.transpose(1, 2).requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    expected.sum().backward()
    pairs = [(out.detach(), expected), *((a.grad, b.grad) for a, b in zip(own, whole, strict=True))]
    error = max((unshard(a, group) - b.transpose(1, 2)).abs().max().item() for a, b in pairs)
    print(
        f"rank {rank}: {own[0].shape[1]} of 64 tokens, largest difference {error:.1e}", flush=True
    )
    assert error < 1e-12
    leave_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder, "rendezvous").as_uri()
        mp.spawn(rank_main, args=(2, address), nprocs=2)
