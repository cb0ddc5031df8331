"""How much of the communication is hidden behind backward.

`OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/overlap.py`

Three times of one step, in turn in every round: alone (one rank's buffer, without communication),
afterwards (everything is reduced by `finish`) and overlapped. Communication costs what afterwards
takes longer than alone; hidden is the share of it that overlapping saves: 1 is all, 0 nothing, and
below 0 it costs. Times are added up over the rounds, because a difference of two single steps is
mostly noise; the spread is that of the same share of resampled rounds.

Where ranks and the threads of gloo share the cores, communication is computing too, and what is
hidden of it says more about the cores than about the code.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from mt_data_parallel import GradBuffer
from torch import nn

WIDTH, LAYERS, ROUNDS, BUCKET = 1024, 8, 25, 1 << 20
Step = Callable[[], None]


def stepper(group: dist.ProcessGroup | None, rows: int, *, overlap: bool) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    named = list(model.named_parameters())
    buffer = GradBuffer(named, group=group, bucket_size=BUCKET, overlap=overlap)
    x = torch.randn(rows, WIDTH)

    def step() -> None:
        buffer.start(1)
        model(x).square().sum().backward()
        buffer.finish()

    return step


def seconds(step: Step) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def hidden(rounds: Sequence[tuple[float, float, float]]) -> float:
    """Return the hidden share of the communication."""
    alone, afterwards, overlapped = (sum(times) for times in zip(*rounds, strict=True))
    return (afterwards - overlapped) / (afterwards - alone)


def measure(rows: int) -> None:
    steps = [
        stepper(None, rows, overlap=True),
        stepper(dist.group.WORLD, rows, overlap=False),
        stepper(dist.group.WORLD, rows, overlap=True),
    ]
    rounds: list[tuple[float, float, float]] = []
    for number in range(ROUNDS + 2):
        order = [0, 1, 2] if number % 2 else [2, 1, 0]
        times = {place: seconds(steps[place]) for place in order}
        rounds.append((times[0], times[1], times[2]))
    rounds = rounds[2:]  # which warm up
    draw = random.Random(0)  # noqa: S311 - which rounds are drawn is no secret
    spread = sorted(hidden(draw.choices(rounds, k=ROUNDS)) for _ in range(1000))
    if dist.get_rank() == 0:
        cost = statistics.median(b / a for a, b, _ in rounds)
        ratio = statistics.median(c / b for _, b, c in rounds)
        print(
            f"{dist.get_world_size()} ranks, {rows} rows: hidden {hidden(rounds):.2f} (nine of ten "
            f"resamples {spread[50]:.2f} to {spread[950]:.2f}); step afterwards / alone "
            f"{cost:.2f}, overlapped / afterwards {ratio:.2f}"
        )


def main() -> None:
    dist.init_process_group("gloo")
    for rows in (64, 512):
        measure(rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
