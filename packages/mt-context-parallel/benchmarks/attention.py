"""Overhead on one rank against torch's attention, and ring against all-gather on two.

    python packages/mt-context-parallel/benchmarks/attention.py

Prints ratios of median times from alternating rounds; below 1 the first one is faster.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from mt_context_parallel import context_parallel_attention
from mt_parallel_state import leave_process_group
from torch import Tensor

ROUNDS = 9


def draw(length: int) -> list[Tensor]:
    return [torch.randn(1, length, heads, 64, requires_grad=True) for heads in (8, 2, 2)]


def ratio(first: Callable[[], Tensor], second: Callable[[], Tensor]) -> str:
    """Compare forward and backward in turns, so that a busy machine disturbs both alike."""
    times: list[list[float]] = [[], []]
    for _ in range(ROUNDS + 2):
        for kept, function in zip(times, (first, second), strict=True):
            if dist.is_initialized():
                dist.barrier()
            started = time.perf_counter()
            function().sum().backward()
            kept.append(time.perf_counter() - started)
    each = [a / b for a, b in zip(times[0][2:], times[1][2:], strict=True)]
    return f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"


def torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def one_rank() -> None:
    for length in (256, 1024, 4096):
        qkv = draw(length)
        found = ratio(
            lambda x=qkv: context_parallel_attention(*x, group=None),
            lambda x=qkv: torch_attention(*x),
        )
        print(f"cp=1 / torch, {length} tokens: {found}")


def rank_main(rank: int, world: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    group = dist.group.WORLD
    for length in (512, 2048):
        qkv = draw(length // world)
        for other in ("all_gather", "ulysses"):
            found = ratio(
                lambda x=qkv: context_parallel_attention(*x, group=group),
                lambda x=qkv, name=other: context_parallel_attention(
                    *x, group=group, algorithm=name
                ),
            )
            if rank == 0:
                print(f"ring / {other}, cp={world}, {length} tokens: {found}", flush=True)
    leave_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    one_rank()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(2, Path(folder, "rendezvous").as_uri()), nprocs=2)
