"""Tensor-parallel layers at tp=1 against plain torch, and the losses against liger-kernel, in bf16.

Every comparison alternates in one process: forward and backward, time and peak memory, as ratios
ours / theirs. Writes a JSON file and prints a table row per layer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from environment import environment
from mt_fusions import cross_entropy
from mt_tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    linear_cross_entropy,
)
from torch import Tensor, nn

Step = Callable[[], Tensor]
ROUNDS, STEPS = 9, 10


def pairs(options: argparse.Namespace, device: torch.device) -> dict[str, tuple[Step, Step]]:
    """Forward passes of ours and of plain torch on the same tensors, by name."""
    make: Any = {"device": device, "dtype": options.dtype}
    hidden, ffn, vocab = options.hidden, options.ffn, options.vocab
    x = torch.randn(1, options.tokens, hidden, requires_grad=True, **make)
    wide = torch.randn(1, options.tokens, ffn, requires_grad=True, **make)
    ids = torch.randint(0, vocab, (1, options.tokens), device=device)
    column, row = ColumnParallelLinear(hidden, ffn, **make), RowParallelLinear(ffn, hidden, **make)
    up, down = nn.Linear(hidden, ffn, **make), nn.Linear(ffn, hidden, **make)
    table, plain = (
        VocabParallelEmbedding(vocab, hidden, **make),
        nn.Embedding(vocab, hidden, **make),
    )
    for mine, other in ((column, up), (row, down), (table, plain)):
        other.load_state_dict(mine.state_dict())
    logits = torch.randn(options.tokens, vocab, requires_grad=True, **make)
    head = (0.02 * torch.randn(vocab, hidden, **make)).requires_grad_()
    rows, labels = x[0], ids[0]
    found: dict[str, tuple[Step, Step]] = {
        "column linear": (lambda: column(x), lambda: up(x)),
        "row linear": (lambda: row(wide), lambda: down(wide)),
        "MLP": (lambda: row(F.silu(column(x))), lambda: down(F.silu(up(x)))),
        "embedding": (lambda: table(ids), lambda: plain(ids)),
        "cross entropy": (
            lambda: cross_entropy(logits, labels, reduction="none"),
            lambda: F.cross_entropy(logits.float(), labels, reduction="none"),
        ),
        "linear + cross entropy": (
            lambda: linear_cross_entropy(rows, head, labels),
            lambda: F.cross_entropy(F.linear(rows, head).float(), labels, reduction="sum"),
        ),
    }
    return found | liger_pairs((logits, rows, head, labels))


def liger_pairs(inputs: tuple[Tensor, ...]) -> dict[str, tuple[Step, Step]]:
    """The losses against liger-kernel's Triton kernels, where it is installed and can run."""
    logits, rows, head, labels = inputs
    if not logits.is_cuda:
        return {}
    try:
        from liger_kernel.transformers import (
            LigerCrossEntropyLoss,
            LigerFusedLinearCrossEntropyLoss,
        )
    except ImportError:
        print("without liger-kernel: pip install liger-kernel, or uv run --group bench")
        return {}
    plain, fused = (
        LigerCrossEntropyLoss(reduction="sum"),
        LigerFusedLinearCrossEntropyLoss(reduction="sum"),
    )
    # Liger writes the gradient into the logits, so each call gets its own copy, and so does ours.
    return {
        "cross entropy / liger": (
            lambda: cross_entropy(logits.clone(), labels, reduction="sum", in_place=True),
            lambda: plain(logits.clone(), labels),
        ),
        "linear + cross entropy / liger": (
            lambda: linear_cross_entropy(rows, head, labels),
            lambda: fused(head, rows, labels),
        ),
    }


def run(step: Step, device: torch.device, steps: int) -> tuple[float, int, float]:
    """Return the seconds of a step, the additional peak bytes, and the mean of the output."""
    started, peak = 0.0, 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        peak = -torch.cuda.memory_allocated()
    started = time.perf_counter()
    for _ in range(steps):
        y = step()
        y.sum().backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
        peak += torch.cuda.max_memory_allocated()
    return (time.perf_counter() - started) / steps, peak, float(y.detach().double().mean())


def compare(name: str, ours: Step, theirs: Step, device: torch.device) -> dict[str, Any]:
    for step in (ours, theirs):
        run(step, device, 3)
    ratios, memory, values = [], (0, 0), (0.0, 0.0)
    for _ in range(ROUNDS):
        mine, other = run(ours, device, STEPS), run(theirs, device, STEPS)
        ratios.append(mine[0] / other[0])
        memory, values = (mine[1], other[1]), (mine[2], other[2])
    return {
        "layer": name,
        "time_ratio": statistics.median(ratios),
        "time_ratio_range": [min(ratios), max(ratios)],
        "memory_ratio": memory[0] / memory[1] if memory[1] > 0 else None,
        "mean_output": values,
    }


def row(result: dict[str, Any]) -> str:
    low, high = result["time_ratio_range"]
    memory = "unknown" if result["memory_ratio"] is None else f"{result['memory_ratio']:.2f}"
    return (
        f"| {result['layer']} | {result['time_ratio']:.2f} ({low:.2f} to {high:.2f}) | {memory} |"
    )


def main() -> None:
    """Run the comparisons and write what they reached."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--ffn", type=int, default=11008)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--smoke", action="store_true", help="tiny, in fp32, on a CPU")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.smoke:
        device = torch.device("cpu")
        options.tokens, options.hidden, options.ffn, options.vocab = 64, 32, 48, 128
    elif device.type == "cpu":
        print("gpu_layers.py: there is no CUDA device; --smoke runs the same code on a CPU")
        return
    options.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    results = []
    print("| layer | time, ours / theirs | peak memory |\n|---|---|---|")
    for name, (ours, theirs) in pairs(options, device).items():
        results.append(compare(name, ours, theirs, device))
        print(row(results[-1]), flush=True)
    if options.out is not None:
        sizes = {name: getattr(options, name) for name in ("tokens", "hidden", "ffn", "vocab")}
        report = {**environment(), "dtype": str(options.dtype), **sizes, "results": results}
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
