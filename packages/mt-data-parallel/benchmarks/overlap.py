"""How much of the reduction is hidden behind backward, as a share of its time alone.

`OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/overlap.py`

Four times of one step, interleaved in one run: with overlap, without, without any communication,
and the collectives alone. Hidden is what a step with overlap takes less than computing and
communicating one after the other, over the time of communicating alone: 1 is all, 0 is nothing.
Where ranks and the threads of gloo share the cores, communication takes compute time itself, and
the share says more about the cores than about the code.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from mt_data_parallel import GradBuffer
from torch import nn

WIDTH, LAYERS, ROWS, ROUNDS, BUCKET = 1024, 8, 256, 9, 1 << 20


def stepper(group: dist.ProcessGroup | None, x: torch.Tensor, *, overlap: bool) -> Callable:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    named = list(model.named_parameters())
    buffer = GradBuffer(named, group=group, bucket_size=BUCKET, overlap=overlap)

    def step() -> None:
        buffer.start(1)
        model(x).square().sum().backward()
        buffer.finish()

    return step


def collectives() -> Callable:
    buckets = [torch.zeros(BUCKET + WIDTH) for _ in range(LAYERS)]

    def step() -> None:
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()

    return step


def seconds(step: Callable) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def main() -> None:
    dist.init_process_group("gloo")
    x = torch.randn(ROWS, WIDTH)
    runs = {
        "overlap": stepper(dist.group.WORLD, x, overlap=True),
        "afterwards": stepper(dist.group.WORLD, x, overlap=False),
        "alone": stepper(None, x, overlap=True),
        "collectives": collectives(),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(ROUNDS + 1):
        for name, step in runs.items():
            elapsed = seconds(step)
            if number:  # the first round warms up
                times[name].append(elapsed)
    if dist.get_rank() == 0:
        rounds = [dict(zip(times, row, strict=True)) for row in zip(*times.values(), strict=True)]
        hidden = sorted(1 - (row["overlap"] - row["alone"]) / row["collectives"] for row in rounds)
        ratio = sorted(row["overlap"] / row["afterwards"] for row in rounds)
        share = statistics.median(row["collectives"] / row["alone"] for row in rounds)
        print(f"{dist.get_world_size()} ranks; collectives / compute {share:.2f}")
        print(f"hidden {_spread(hidden)}; step with overlap / without {_spread(ratio)}")
    dist.destroy_process_group()


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})"


if __name__ == "__main__":
    main()
