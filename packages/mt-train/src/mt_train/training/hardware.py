"""Properties of the machine: peak arithmetic rates and memory in use."""

from __future__ import annotations

import resource
import sys
import time

import torch

# Dense peaks of bf16 and fp16 in FLOP/s from the vendors' data sheets (no sparsity).
_PEAK = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return a device's dense peak in FLOP/s, or None if no figure is known (CPUs)."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK.items() if part in name), None)


def bf16_speedup(*, size: int = 512, rounds: int = 5) -> float:
    """Measure the ratio of this CPU's speeds of matrix products in bf16 and in fp32.

    Names of instructions don't show it: with the same ones it is about 1 on one maker's chips and
    above 2 on another's, and far below 1 without such instructions.

    Args:
        size: Rows and columns of the matrices.
        rounds: Number of measurements, in seconds of this thread; the best one counts, since it was
            disturbed least.
    """
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(size, size, dtype=dtype)
        matrix.mm(matrix)  # the first one also chooses the kernel
        seconds[dtype] = min(_thread_seconds(matrix) for _ in range(rounds))
    return seconds[torch.float32] / seconds[torch.bfloat16]


def _thread_seconds(matrix: torch.Tensor) -> float:
    start = time.thread_time()
    matrix.mm(matrix)
    return max(time.thread_time() - start, 1e-9)


def memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this rank: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
