"""Our executor and torch.distributed.pipelining: equal gradients, and the ratio of step times.

    python packages/mt-pipeline/benchmarks/torch_pipelining.py --stages 2 4 --launches 3

Steps of the two alternate in one run, each begun together by all ranks and timed until the last one
is done. For each schedule the median of the ratios ours / theirs of neighbouring steps is printed,
with the middle half of them, and the ratio of the CPU time of all ranks, which a busy machine
changes less. Below 1 is faster than torch. Where processes and memory come to lie makes some
launches faster than others, so several are pooled.

Ours includes the two all-reduces by which the ranks of an `Executor` tell each other of a failure,
unless `--no-share-failures` is given. torch's do not tell each other.
"""

import argparse
import copy
import itertools
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mt_pipeline import Executor, TensorSpec
from mt_schedule import Schedule, make_schedule
from torch import nn

MICROBATCHES = 8
SIZES = {"small": (8, 64, 2), "medium": (16, 384, 3)}  # rows of a micro-batch, width, layers
# Our name and options, torch's class.
PAIRS = [
    ("gpipe", {}, "ScheduleGPipe"),
    ("1f1b", {}, "Schedule1F1B"),
    ("interleaved", {"chunks": 2}, "ScheduleInterleaved1F1B"),
    ("bfs", {"chunks": 2}, "ScheduleLoopedBFS"),
    ("zb-v", {}, "ScheduleZBVZeroBubble"),
    ("dualpipe-v", {}, "ScheduleDualPipeV"),
]


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the MLP to its input."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def make_stage(number: int, width: int, layers: int) -> nn.Module:
    """The stage of this number; its weights depend on nothing else."""
    torch.manual_seed(number)
    return nn.Sequential(*[Block(width) for _ in range(layers)]).double()


def sum_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The objective."""
    return (output - target).square().sum()


Step = Callable[[torch.Tensor, torch.Tensor], object]


def their_step(name: str, stages: list[nn.Module], schedule: Schedule) -> Step:
    """A function that runs one step of torch's schedule."""
    from torch.distributed.pipelining import PipelineStage, schedules

    kind = getattr(schedules, name)
    numbers = schedule.stages_of(dist.get_rank())
    wrapped = [
        PipelineStage(module, number, schedule.stages, torch.device("cpu"))
        for number, module in zip(numbers, stages, strict=True)
    ]
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    runner = kind(
        wrapped[0] if single else wrapped,
        n_microbatches=schedule.microbatches,
        loss_fn=sum_loss,
        scale_grads=False,
    )

    def step(x: torch.Tensor, target: torch.Tensor) -> None:
        inputs = (x,) if 0 in numbers else ()
        last = schedule.stages - 1 in numbers
        runner.step(*inputs, target=target if last else None, losses=[] if last else None)

    return step


def our_step(stages: list[nn.Module], schedule: Schedule, *, share_failures: bool) -> Step:
    """A function that runs one step of ours."""
    functions = [
        lambda x, batch, module=module: module(batch[0] if x is None else x) for module in stages
    ]
    executor = Executor(
        schedule,
        functions if len(functions) > 1 else functions[0],
        group=dist.group.WORLD,
        activation=lambda batch: TensorSpec(tuple(batch[0].shape), batch[0].dtype),
        share_failures=share_failures,
    )

    def step(x: torch.Tensor, target: torch.Tensor) -> None:
        halves = [whole.chunk(schedule.microbatches) for whole in (x, target)]
        executor.run(
            list(zip(*halves, strict=True)),
            objective=lambda output, batch: sum_loss(output, batch[1]),
        )

    return step


def largest(value: float) -> float:
    """The largest of all ranks' values."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


def seconds(step: Step, data: torch.Tensor) -> tuple[float, float]:
    """The time from when all ranks are there until the last is done, and all ranks' CPU time."""
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    step(*data)
    cpu = torch.tensor([time.process_time() - used], dtype=torch.float64)
    wall = largest(time.perf_counter() - start)
    dist.all_reduce(cpu)
    return wall, cpu.item()


def compare(ours: Step, theirs: Step, data: torch.Tensor, steps: int) -> list[list[float]]:
    """The ratios ours / theirs of neighbouring steps' times, and of their CPU times."""
    ratios: list[list[float]] = [[], []]
    for turn in range(steps + 2):
        order = (ours, theirs) if turn % 2 else (theirs, ours)
        took = {step: seconds(step, data) for step in order}
        if turn >= 2:  # the first ones warm up
            for kept, one, other in zip(ratios, took[ours], took[theirs], strict=True):
                kept.append(one / other)
    return ratios


def run(rank: int, world: int, arguments: argparse.Namespace, folder: str) -> None:
    """Compare all schedules on one rank of `world`."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    results = []
    for (size, (rows, width, layers)), (name, options, kind) in itertools.product(
        SIZES.items(), PAIRS
    ):
        if name not in arguments.schedules or size not in arguments.sizes:
            continue
        schedule = make_schedule(name, stages=world, microbatches=MICROBATCHES, **options)
        mine = [make_stage(s, width, layers) for s in schedule.stages_of(rank)]
        copies = copy.deepcopy(mine)
        torch.manual_seed(99)
        data = torch.randn(2, MICROBATCHES * rows, width, dtype=torch.float64)
        label = f"{world} stages, {size:6} {name:11} against {kind:23}"
        try:
            theirs = their_step(kind, copies, schedule)
            theirs(*data)
        except Exception as error:  # noqa: BLE001 (whatever torch says is the result)
            if rank == 0:
                print(f"{label}: torch raises {type(error).__name__}: {str(error)[:80]}")
            continue
        ours = our_step(mine, schedule, share_failures=arguments.share_failures)
        ours(*data)
        gradients = [
            [p.grad for m in modules for p in m.parameters()] for modules in (mine, copies)
        ]
        differences = (float((a - b).abs().max()) for a, b in zip(*gradients, strict=True))
        worst = largest(max(differences))
        wall, cpu = compare(ours, theirs, data, arguments.steps)
        if rank == 0:
            results.append({"label": label, "wall": wall, "cpu": cpu, "worst": worst})
    if rank == 0:
        Path(folder, f"{time.time_ns()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def main() -> None:
    """Compare on each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--schedules", nargs="+", default=[name for name, _, _ in PAIRS])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--share-failures", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    for world in arguments.stages:
        pooled: dict[str, list[dict[str, Any]]] = {}
        for _ in range(arguments.launches):
            with tempfile.TemporaryDirectory() as folder:
                mp.start_processes(
                    run, args=(world, arguments, folder), nprocs=world, start_method="fork"
                )
                for file in Path(folder).glob("*.json"):
                    for result in json.loads(file.read_text()):
                        pooled.setdefault(result["label"], []).append(result)
        for label, results in pooled.items():
            wall = [ratio for result in results for ratio in result["wall"]]
            cpu = [ratio for result in results for ratio in result["cpu"]]
            low, middle, high = statistics.quantiles(wall, n=4)
            worst = max(result["worst"] for result in results)
            print(
                f"{label}: {middle:.2f} ({low:.2f} .. {high:.2f}), "
                f"CPU {statistics.median(cpu):.2f}, gradients differ by {worst:.0e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
