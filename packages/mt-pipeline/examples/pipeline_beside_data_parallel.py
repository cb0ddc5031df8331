"""Four ranks: two pipelines of two stages, their gradients summed over the data-parallel pairs."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mt_parallel_state import ParallelLayout, ParallelState, leave_process_group
from mt_pipeline import Executor, TensorSpec
from mt_schedule import make_schedule, split_layers
from torch import nn

LAYOUT = ParallelLayout(pp=2, dp=2)
WIDTH, MICROBATCHES = 8, 3


def train(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=LAYOUT.world_size
    )
    with ParallelState(LAYOUT) as state:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        own = nn.Sequential(
            *(layers[i] for i in split_layers(4, LAYOUT.size("pp"))[state.index("pp")])
        )
        executor = Executor(
            make_schedule("1f1b", stages=LAYOUT.size("pp"), microbatches=MICROBATCHES),
            lambda x, microbatch: own(microbatch if x is None else x),
            group=state.group("pp"),
            activation=lambda microbatch: TensorSpec(tuple(microbatch.shape), microbatch.dtype),
        )
        torch.manual_seed(1 + state.index("dp"))  # each pipeline has its own share of the data
        batches = [torch.randn(4, WIDTH) for _ in range(MICROBATCHES)]
        executor.run(batches, objective=lambda output, _: output.square().sum())
        for parameter in own.parameters():
            dist.all_reduce(parameter.grad, group=state.group("dp"))
        norm = torch.stack([p.grad.norm() for p in own.parameters()]).norm()
        where = f"stage {state.index('pp')} of pipeline {state.index('dp')}"
        print(f"rank {rank} = {where}: gradient norm {norm.item():.6f}")
    leave_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        # Forked ranks start at once; spawned ones would each import torch again.
        mp.start_processes(
            train, args=(f"{folder}/store",), nprocs=LAYOUT.world_size, start_method="fork"
        )
