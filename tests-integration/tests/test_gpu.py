"""The spine on a GPU: the same runs as on a CPU, with the same numbers.

A run is the real command; it takes the GPU where it sees one, and an empty
CUDA_VISIBLE_DEVICES hides it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).parents[2]
# Relative tolerance of the losses of 20 steps. Matrix products add in another order.
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4}


def run(*command: object, gpu: bool, timeout: float = 300) -> str:
    environment = {**os.environ, **({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})}
    words = [str(word) for word in command]
    finished = subprocess.run(
        words, capture_output=True, text=True, timeout=timeout, env=environment, check=False
    )
    assert finished.returncode == 0, f"{words}\n{finished.stdout}\n{finished.stderr}"
    return finished.stdout


@pytest.fixture
def train(tiny, losses):
    """Train the tiny model on one device; gives the losses by step."""

    def call(out: Path, *overrides: str, gpu: bool, nproc: int = 1) -> dict[int, float]:
        command = tiny.command(out, "training.steps=20", *overrides, nproc=nproc, real=True)
        printed = run(*command, gpu=gpu)
        assert f" on {'cuda' if gpu else 'cpu'};" in printed
        return losses(out)

    return call


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_gpu_gives_the_losses_of_a_cpu(dtype, train, tmp_path) -> None:
    options = [f"training.dtype={dtype}"]
    on_cpu = train(tmp_path / "cpu", *options, gpu=False)
    on_gpu = train(tmp_path / "gpu", *options, gpu=True)
    assert on_gpu == pytest.approx(on_cpu, rel=TOLERANCE[dtype])


def test_bf16_on_a_gpu_follows_fp32(train, tmp_path) -> None:
    exact = train(tmp_path / "fp32", "training.dtype=fp32", gpu=True)
    rounded = train(tmp_path / "bf16", "training.dtype=bf16", gpu=True)
    assert rounded == pytest.approx(exact, rel=2e-2)


def test_compiled_training_gives_the_losses_of_eager(train, tmp_path) -> None:
    eager = train(tmp_path / "eager", "training.steps=5", gpu=True)
    compiled = train(tmp_path / "compiled", "training.steps=5", "training.compile=true", gpu=True)
    assert compiled == pytest.approx(eager, rel=1e-4)


@pytest.mark.parametrize("graphs", ["layer", "step"])
def test_captured_training_gives_the_losses_of_eager(graphs, train, tmp_path) -> None:
    eager = train(tmp_path / "eager", "training.steps=5", gpu=True)
    options = ("training.steps=5", f"training.cuda_graphs={graphs}")
    assert train(tmp_path / "captured", *options, gpu=True) == pytest.approx(eager, rel=1e-5)


def test_a_profile_has_kernels_and_the_history_of_memory(train, tmp_path) -> None:
    train(tmp_path, "training.steps=4", "training.profile={steps: [2, 3]}", gpu=True)
    name = tmp_path / "profile" / "rank_0_steps_2_to_3"
    events = json.loads(name.with_suffix(".json").read_text())["traceEvents"]
    assert any(each.get("cat") == "kernel" for each in events)
    assert name.with_name(f"{name.name}_memory.pickle").stat().st_size > 0


@pytest.mark.parametrize("first", [True, False], ids=["gpu-to-cpu", "cpu-to-gpu"])
def test_a_checkpoint_moves_between_devices(first, train, tmp_path) -> None:
    whole = train(tmp_path / "whole", gpu=False)
    train(tmp_path / "first", "checkpoint.every=10", gpu=first)
    half = tmp_path / "first" / "checkpoints" / "step_00000010"
    second = train(tmp_path / "second", f"checkpoint.load={half}", gpu=not first)
    assert second == pytest.approx({s: whole[s] for s in range(11, 21)}, rel=TOLERANCE["fp32"])


def test_greedy_text_is_the_same_on_both_devices(train, tmp_path) -> None:
    train(tmp_path / "run", gpu=False)
    command = [sys.executable, "-m", "mt_infer", "generate", tmp_path / "run", "--prompt", "def "]
    options = ["--max-tokens", 24, "--greedy", "--dtype", "fp32"]
    assert run(*command, *options, gpu=True) == run(*command, *options, gpu=False)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_quickstart_runs_on_a_gpu(dtype, tmp_path) -> None:
    out = tmp_path / "run"
    run(sys.executable, "-m", "mt_train", "quickstart", "--steps", 5, "--out", out, gpu=True)
    config = out / "config.yaml"
    again = tmp_path / "again"
    options = [f"training.dtype={dtype}", "--out", again]
    run(sys.executable, "-m", "mt_train", "run", config, *options, gpu=True)
    records = [json.loads(line) for line in (again / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["bits_per_byte"] > 0
    assert (records[0]["mfu"] is not None) == (dtype == "bf16")


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["parallel.tp=2"],
        ["parallel.tp=2", "parallel.sequence_parallel=true"],
        ["parallel.pp=2"],
    ],
    ids=["dp2", "tp2", "tp2-sp", "pp2"],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_gpus_train_like_one(dtype, overrides, train, tmp_path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs for NCCL, found {torch.cuda.device_count()}")
    options = [f"training.dtype={dtype}", "training.micro_batch_size=4"]
    one = train(tmp_path / "one", *options, gpu=True)
    two = train(tmp_path / "two", *options, *overrides, gpu=True, nproc=2)
    assert two == pytest.approx(one, rel={"fp32": 1e-4, "bf16": 2e-2}[dtype])


def test_the_benchmark_writes_its_report(tmp_path) -> None:
    script = ROOT / "tests-integration" / "benchmarks" / "gpu_train.py"
    out = tmp_path / "report.json"
    sizes = ["--model", "smoke", "--length", 64, "--warmup", 1, "--steps", 2, "--forms", "eager"]
    run(sys.executable, script, *sizes, "--out", out, gpu=True)
    report = json.loads(out.read_text())
    assert report["device"] == torch.cuda.get_device_name()
    assert report["results"][0]["tokens_per_second"] > 0
