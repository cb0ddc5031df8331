"""What a GradBuffer adds to forward and backward on one rank, where it has nothing to reduce.

    python packages/mt-data-parallel/benchmarks/grad_buffer.py

Prints the ratio of the median times with and without the buffer: 1 is free.
"""

import statistics
import time

import torch
from mt_data_parallel import GradBuffer
from torch import nn

ROUNDS, ROWS, WIDTH, LAYERS = 15, 2048, 512, 8


def make_model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).to(dtype)


def seconds(
    model: nn.Module, x: torch.Tensor, microbatches: int, buffer: GradBuffer | None
) -> float:
    start = time.perf_counter()
    if buffer is None:
        model.zero_grad()
    else:
        buffer.start(microbatches)
    for _ in range(microbatches):
        model(x).sum().backward()
    if buffer is not None:
        buffer.finish()
    return time.perf_counter() - start


def main() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for microbatches in (1, 4):
            plain, buffered = make_model(dtype), make_model(dtype)
            buffer = GradBuffer(buffered.named_parameters(), group=None)
            x = torch.randn(ROWS, WIDTH, dtype=dtype)
            pairs = [
                (seconds(buffered, x, microbatches, buffer), seconds(plain, x, microbatches, None))
                for _ in range(ROUNDS)
            ][3:]
            ratio = statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)
            print(f"{dtype}, {microbatches} micro-batches of {ROWS} rows: {ratio:.3f}")


if __name__ == "__main__":
    main()
