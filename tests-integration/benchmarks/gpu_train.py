"""Training speed of a 1.3B-parameter GPT on one GPU, through mt-train's own training step.

Writes a JSON file and prints a table row per form: tokens/s, TFLOP/s, MFU and peak memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from environment import environment
from mt_data import BatchSampler
from mt_parallel_state import ParallelLayout, ParallelState
from mt_train.config.kinds.text import TextData
from mt_train.config.loading import build_model
from mt_train.config.model_section import ModelSection
from mt_train.config.optimizer_section import OptimizerSection
from mt_train.config.run_config import RunConfig, TrainingSection
from mt_train.training.trainer import Trainer

VOCAB = {"1.3b": 50304, "smoke": 512}
MODELS = {
    "1.3b": ModelSection(hidden_size=2048, num_layers=24, num_heads=16, ffn_size=5504, tied=True),
    "smoke": ModelSection(hidden_size=64, num_layers=2, num_heads=4, ffn_size=192, tied=True),
}


class RandomSamples:
    """Samples of random tokens, since the data path is not measured."""

    def __init__(self, *, length: int, vocab_size: int) -> None:
        self._length, self._vocab_size = length, vocab_size

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> np.ndarray:
        return np.random.default_rng(index).integers(self._vocab_size, size=self._length + 1)


def make_trainer(options: argparse.Namespace, device: torch.device, *, compiled: bool) -> Trainer:
    config = RunConfig(
        model=MODELS[options.model],
        data=TextData(corpus="standard-library"),  # not read: the batches are random
        training=TrainingSection(
            steps=options.steps + options.warmup + 1,
            global_batch_size=options.batch * options.accumulation,
            micro_batch_size=options.batch,
            sequence_length=options.length,
            dtype="bf16" if device.type == "cuda" else "fp32",
            compile=compiled,
        ),
        optimizer=OptimizerSection(lr=1e-4),
    )
    vocab_size = VOCAB[options.model]
    sampler = BatchSampler(
        RandomSamples(length=options.length, vocab_size=vocab_size),
        global_batch_size=config.training.global_batch_size,
        micro_batch_size=options.batch,
    )
    model = build_model(config.model, vocab_size, options.length)
    state = ParallelState(ParallelLayout(), device=device)
    return Trainer(config, model, state, sampler=sampler)


def measure(options: argparse.Namespace, device: torch.device, *, compiled: bool) -> dict[str, Any]:
    """Times whole optimizer steps; the clock is read when the device has finished each."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer = make_trainer(options, device, compiled=compiled)
    seconds: list[float] = []
    record: dict[str, Any] = {}
    for step in range(options.warmup + options.steps):
        started = time.perf_counter()
        record = trainer.train_step().record
        if device.type == "cuda":
            torch.cuda.synchronize()
        if step >= options.warmup:
            seconds.append(time.perf_counter() - started)
    tokens = options.batch * options.accumulation * options.length
    median = statistics.median(seconds)
    # The trainer's figures are for its own seconds; scale them to the ones measured here.
    scale = tokens / median / record["tokens_per_second"]
    return {
        "form": "compiled" if compiled else "eager",
        "parameters": trainer.count_parameters(),
        "tokens_per_step": tokens,
        "seconds_per_step": median,
        "seconds_per_step_range": [min(seconds), max(seconds)],
        "tokens_per_second": tokens / median,
        "tflops_per_second": record["tflops_per_second"] * scale,
        "mfu": None if record["mfu"] is None else record["mfu"] * scale,
        "peak_memory_gib": record["memory_bytes"] / 2**30,
        "loss": record["loss"],
    }


def row(result: dict[str, Any]) -> str:
    mfu = "unknown" if result["mfu"] is None else f"{result['mfu']:.1%}"
    return (
        f"| {result['form']} | {result['tokens_per_second']:,.0f} | "
        f"{result['tflops_per_second']:.3g} | {mfu} | {result['peak_memory_gib']:.1f} |"
    )


def main() -> None:
    """Run the forms and write what they reached."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="1.3b")
    parser.add_argument("--batch", type=int, default=8, help="rows of a micro-batch")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--forms", nargs="+", choices=["eager", "compiled"])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and options.model != "smoke":
        print("gpu_train.py: there is no CUDA device; --model smoke runs the same code on a CPU")
        return
    results = []
    print("| form | tokens/s | TFLOP/s | MFU | peak GiB |\n|---|---|---|---|---|")
    for form in options.forms or ["eager", "compiled"]:
        results.append(measure(options, device, compiled=form == "compiled"))
        print(row(results[-1]), flush=True)
        torch._dynamo.reset()
    if options.out is not None:
        report = {**environment(), "model": options.model, "results": results}
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
