"""Train an MLP on two pipeline stages, and compare with the same MLP on one process."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mt_parallel_state import leave_process_group
from mt_pipeline import Executor, TensorSpec
from mt_schedule import make_schedule, split_layers
from torch import Tensor, nn

STAGES, MICROBATCHES, STEPS, ROWS, WIDTH = 2, 4, 5, 32, 16


def make_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(6)]


def make_batch(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).double()


def objective(output: Tensor, microbatch: Tensor) -> Tensor:
    return (output - microbatch.roll(1, dims=-1)).square().sum() / (ROWS * WIDTH)


def train(rank: int, stages: int, store: str) -> None:
    torch.set_num_threads(1)
    group = None
    if stages > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=stages)
        group = dist.group.WORLD

    own = nn.Sequential(*(make_layers()[i] for i in split_layers(6, stages)[rank]))
    executor = Executor(
        make_schedule("1f1b", stages=stages, microbatches=MICROBATCHES),
        lambda x, microbatch: own(microbatch if x is None else x),
        group=group,
        activation=lambda microbatch: TensorSpec(tuple(microbatch.shape), microbatch.dtype),
    )
    optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = make_batch(step)
        outputs = executor.run(batch, objective=objective)  # cut into micro-batches of 8 rows
        optimizer.step()
        if outputs:  # on the last stage
            loss = objective(torch.cat(outputs), batch)
            print(f"{stages} stage(s), step {step}: loss {loss.item():.17f}")
    if group is not None:
        leave_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # Forked ranks start at once; spawned ones would each import torch again.
        mp.start_processes(
            train, args=(STAGES, f"{folder}/store"), nprocs=STAGES, start_method="fork"
        )
    train(0, 1, "")


if __name__ == "__main__":
    main()
