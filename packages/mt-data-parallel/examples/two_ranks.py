"""Two gloo ranks train one model on different rows and end with the same parameters.

python packages/mt-data-parallel/examples/two_ranks.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mt_data_parallel import GradBuffer, grad_of
from mt_parallel_state import leave_process_group
from torch import nn

WORLD, ROWS, STEPS, MICROBATCHES = 2, 16, 5, 2


def train(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same initial model everywhere
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    buffer = GradBuffer(model.named_parameters(), group=dist.group.WORLD, bucket_size=100)
    rows = torch.randn(ROWS, 8).chunk(WORLD)[rank]
    for step in range(STEPS):
        loss = torch.zeros(())
        buffer.start(MICROBATCHES)
        for part in rows.chunk(MICROBATCHES):
            # A sum over rows divided by the global count: the buffer adds, it never averages.
            part_loss = (model(part) - part.sum(1, keepdim=True)).square().sum() / ROWS
            part_loss.backward()  # full buckets are reduced while this runs
            loss += part_loss.detach()
        buffer.finish()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * grad_of(param)
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f} in {buffer.num_buckets} buckets")
    buffer.close()  # before the group is destroyed
    weights = [torch.zeros_like(model[0].weight) for _ in range(WORLD)]
    dist.all_gather(weights, model[0].weight.detach())
    assert torch.equal(*weights), "the replicas differ"
    if rank == 0:
        print("both ranks hold bit-equal parameters")
    leave_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (f"{folder}/store",), nprocs=WORLD)
