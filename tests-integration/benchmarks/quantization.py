"""What low-bit weights cost a trained model: bits per byte of held-out text, by method and format.

    python tests-integration/benchmarks/quantization.py [--steps 300] [--run FOLDER] [--out FILE]

Trains the quickstart's model for a short while, quantises copies of it after training, calibrated
with tokens it was trained on, and measures each on the held-out text.
"""

import argparse
import copy
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from mt_data import IndexedDataset
from mt_infer import load_run
from mt_parallel_state import ParallelLayout, ParallelState
from mt_quant import QuantizationConfig, QuantizedLinear, Rule, quantize
from mt_testing import environment, write_report
from torch import Tensor, nn

LENGTH = 256
ROWS: tuple[dict[str, Any], ...] = (
    {"weight": "int8"},
    {"weight": "int8", "method": "gptq"},
    {"weight": "int8", "input": "int8"},
    {"weight": "int8", "input": "int8", "method": "smoothquant"},
    {"weight": "fp8"},
    {"weight": "int4-g64"},
    {"weight": "int4-g64", "method": "awq"},
    {"weight": "int4-g64", "method": "gptq"},
    {"weight": "int4-g64", "method": "gptq", "options": {"act_order": True, "static_groups": True}},
    {"weight": "int4-g64", "method": "svdquant", "options": {"rank": 16}},
    {"weight": "int4-g64-asym"},
    {"weight": "int4-g64-asym", "method": "awq"},
    {"weight": "int4-g64-asym", "method": "gptq"},
    {"weight": "nvfp4"},
    {"weight": "nvfp4", "method": "awq"},
    {"weight": "nvfp4", "method": "gptq"},
    {"weight": "mxfp4"},
    {"weight": "mxfp4", "method": "gptq"},
)


def train(folder: Path, steps: int) -> None:
    """Train the quickstart's model on a part of its corpus."""
    command = [sys.executable, "-m", "mt_train", "quickstart", "--steps", str(steps)]
    options = ["--out", str(folder), "data.max_files=300", "evaluation.max_windows=16"]
    subprocess.run([*command, *options], check=True)  # noqa: S603 - our own command


def rows_of(prefix: Path, rows: int, *, every: int = 1) -> Tensor:
    """Return neighbouring tokens of a file, in every `every`-th row."""
    data = IndexedDataset(prefix)
    starts = range(0, rows * LENGTH * every, LENGTH * every)
    texts = [torch.from_numpy(data.stream(at, LENGTH + 1).astype("int64")) for at in starts]
    return torch.stack(texts)


@torch.inference_mode()
def loss_of(model: nn.Module, rows: Tensor) -> float:
    """Return nats for each token of the rows."""
    sums = [model(part[:, :-1], labels=part[:, 1:]) for part in rows.split(16)]
    return float(sum(s["lm"] for s in sums) / sum(s["tokens"] for s in sums))


def stored_bits(model: nn.Module) -> float:
    """Return the bits of codes, scales and thin products, for each quantised weight."""
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    thin = [p for layer in layers for n, p in layer.named_parameters() if n.startswith("low_rank")]
    stored = sum(8 * layer.quantized_weight.nbytes for layer in layers)
    stored += 16 * sum(param.numel() for param in thin)  # a model that is served has 16 bits
    return stored / sum(layer.shape.rows * layer.shape.columns for layer in layers)


def measured(model: nn.Module, held_out: Tensor, calibration: Tensor) -> Iterator[dict[str, Any]]:
    """Yield each row with its loss, in nats per token, beside the original model's loss."""
    before = loss_of(model, held_out)
    yield {"weight": None, "loss": before}
    for row in ROWS:
        config = QuantizationConfig(rules=(Rule(name="layers.*", **row),))
        made = quantize(copy.deepcopy(model), config, list(calibration[:, :-1].split(8)))
        loss = loss_of(made, held_out)
        yield {
            "method": "rtn",
            **row,
            "bits": round(stored_bits(made), 3),
            "loss": loss,
            "worse_by": loss / before - 1,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--run", type=Path, help="a trained run, in place of training one")
    parser.add_argument("--rows", type=int, default=128, help="held-out rows of 256 tokens")
    parser.add_argument("--calibration", type=int, default=64, help="rows to calibrate with")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ParallelState(ParallelLayout()) as state:
        folder = options.run or Path(scratch) / "run"
        if options.run is None:
            train(folder, options.steps)
        generator = load_run(folder, state, dtype="fp32")
        model = generator.model.eval()
        held_out = rows_of(folder / "data" / "validation", options.rows)
        calibration = rows_of(folder / "data" / "train", options.calibration, every=40)
        text = generator.tokenizer.decode(held_out[:, 1:].flatten().tolist())
        bits = held_out[:, 1:].numel() / len(text.encode()) / math.log(2)
        results = []
        for row in measured(model, held_out, calibration):
            row["bits_per_byte"] = row["loss"] * bits
            results.append(row)
            print(*(f"{k}={v:.5g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))
    report = environment() | {
        "steps": options.steps,
        "held_out_tokens": held_out[:, 1:].numel(),
        "calibration_tokens": calibration[:, 1:].numel(),
        "results": results,
    }
    if options.out is not None:
        write_report(options.out, report)


if __name__ == "__main__":
    main()
