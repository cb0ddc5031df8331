"""What noting the extremes of gradients before their sum costs a step, side by side with none.

`OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/addends.py`
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from mt_data_parallel import shard
from mt_data_parallel.addend import Addends
from torch import nn

WIDTH, LAYERS, ROUNDS = 512, 8, 41


def stepper(rows: int, *, notes: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    model = nn.Sequential(*layers)
    buffer = shard(model, "optimizer", group=dist.group.WORLD, units=list(layers))
    if not notes:
        for bucket in buffer.buckets:
            bucket.addends = Addends()  # which watches no parameter
    x = torch.randn(rows, WIDTH)

    def step() -> None:
        buffer.start(1)
        model(x).square().sum().backward()
        buffer.finish()
        buffer.gather_params()

    return step


def seconds(step: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def main() -> None:
    dist.init_process_group("gloo")
    for rows in (16, 256, 2048):
        noting, plain = stepper(rows, notes=True), stepper(rows, notes=False)
        ratios = []
        for number in range(ROUNDS):
            pair = [(noting, 0), (plain, 1)][:: -1 if number % 2 else 1]
            times = {place: seconds(step) for step, place in pair}
            ratios.append(times[0] / times[1])
        low, middle, high = statistics.quantiles(ratios[3:])
        if dist.get_rank() == 0:
            print(f"{rows} rows: noted / not {middle:.3f} (quartiles {low:.3f} to {high:.3f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
