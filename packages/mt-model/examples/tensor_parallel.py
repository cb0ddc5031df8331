"""The same tiny model on one process and on two: equal loss, equal text.

python packages/mt-model/examples/tensor_parallel.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mt_model import GPT, preset
from mt_parallel_state import ParallelLayout, ParallelState, leave_process_group


def loss_and_text(state: ParallelState) -> tuple[float, list[int]]:
    model = GPT(preset("tiny", init_std=0.2), state, dtype=torch.float64, seed=7)
    tokens = torch.randint(0, 512, (2, 33), generator=torch.Generator().manual_seed(0))
    losses = model(None, {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
    prompt = tokens[:1, :4]
    cache = model.new_cache(batch_size=1, max_length=16)
    logits, text = model.logits(prompt, cache=cache), prompt[0].tolist()
    for _ in range(4, 16):
        token = logits[:, -1:].argmax(-1)
        text.append(int(token))
        logits = model.logits(token, cache=cache)
    return (losses["lm"] / losses["tokens"]).item(), text


def rank_main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    with ParallelState(ParallelLayout(tp=2)) as state:
        loss, text = loss_and_text(state)
        print(f"rank {rank} of 2: loss {loss:.12f}, text {text}", flush=True)
    alone = loss_and_text(ParallelState(ParallelLayout()))
    assert abs(loss - alone[0]) < 1e-10
    assert text == alone[1]
    leave_process_group()


if __name__ == "__main__":
    loss, text = loss_and_text(ParallelState(ParallelLayout()))
    print(f"one process: loss {loss:.12f}, text {text}")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(str(Path(folder, "store")),), nprocs=2)
