"""Run 1F1B and ZB-H1 on four ranks, and draw the measured runs above the simulated ones.

    python packages/mt-pipeline/examples/measured_run.py [-o measured.svg]

Every computation is held to a fixed time by sleeping, so that four ranks do not fight for the cores
of a small machine; the order, the waiting and the transfers are the executor's own.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mt_parallel_state import WgradStore, leave_process_group
from mt_pipeline import Executor, TensorSpec
from mt_schedule import Costs, Panel, Schedule, Span, draw_svg, draw_text, make_schedule, simulate
from torch import Tensor, nn

RANKS, MICROBATCHES, WIDTH = 4, 8, 32
FORWARD, INPUT, WEIGHT = 0.02, 0.02, 0.02  # seconds


class Slow(torch.autograd.Function):
    """A linear layer that takes its time; its weight gradient can wait."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: "Stage") -> Tensor:
        """Multiply, slowly."""
        ctx.save_for_backward(x, weight)
        ctx.stage = stage
        time.sleep(FORWARD)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Make the input's gradient, and the weight's now or in W."""
        x, weight = ctx.saved_tensors

        def compute() -> None:
            time.sleep(WEIGHT)
            gradient = grad.t() @ x
            weight.grad = gradient if weight.grad is None else weight.grad + gradient

        store = ctx.stage.wgrad_store
        store.put(compute) if store.active else compute()
        time.sleep(INPUT)
        return grad @ weight, None, None


class Stage(nn.Module):
    """One layer. It offers to leave its weight gradients for W."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.wgrad_store = WgradStore()

    def forward(self, x: Tensor | None, microbatch: Tensor) -> Tensor:
        """Run the layer; a first stage's input wants a gradient too, so that all take as long."""
        return Slow.apply(
            microbatch.clone().requires_grad_() if x is None else x, self.weight, self
        )


def measure(rank: int, folder: str) -> None:
    """Run both schedules on one rank; the first rank draws."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    panels = []
    for name in ("1f1b", "zb-h1"):
        schedule = make_schedule(name, stages=RANKS, microbatches=MICROBATCHES)
        executor = Executor(
            schedule,
            Stage(),
            group=dist.group.WORLD,
            activation=lambda microbatch: TensorSpec(tuple(microbatch.shape), microbatch.dtype),
        )
        batches = [torch.randn(4, WIDTH) for _ in range(MICROBATCHES)]
        for _ in range(2):  # the first run warms up
            executor.run(batches, objective=lambda y, _: y.square().sum(), record=True)
        panels += compare(schedule, executor.timeline())
    if rank == 0:
        for panel in panels:
            print(draw_text(panel, width=150), end="\n\n")
        Path(folder, "measured.svg").write_text(draw_svg(*panels))
    dist.barrier()
    leave_process_group()


def compare(schedule: Schedule, timeline: Sequence[Sequence[Span]]) -> list[Panel]:
    """The measured run, and the simulated run with the requested times."""
    simulated = simulate(schedule, Costs(forward=FORWARD, backward=INPUT + WEIGHT, weight=WEIGHT))
    return [
        Panel(
            schedule=schedule,
            timeline=timeline,
            title=f"{schedule.name} on {RANKS} ranks, measured",
            unit="seconds",
        ),
        Panel(
            schedule=schedule,
            timeline=simulated.timeline,
            title=f"{schedule.name}, simulated",
            unit="seconds",
        ),
    ]


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, help="where to write the drawing")
    output = parser.parse_args().output
    with tempfile.TemporaryDirectory() as folder:
        # Forked ranks start at once; spawned ones would each import torch again.
        mp.start_processes(measure, args=(folder,), nprocs=RANKS, start_method="fork")
        if output is not None:
            output.write_text(Path(folder, "measured.svg").read_text())
            print(f"wrote {output}")


if __name__ == "__main__":
    main()
