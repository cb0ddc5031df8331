"""Steps of replayed graphs; on a CPU, eager steps with a check of a graph's rules."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest
import torch
from mt_data_parallel import GradBuffer, GraphSinks
from mt_testing import sample

STEPS = ("training.steps=3", "training.micro_batch_size=2")
CLOCKS = ("seconds", "eta_seconds", "tokens_per_second", "tflops_per_second", "memory_bytes")


RUNS = [
    (),
    ("model.dropout=0.1", "model.tied=true"),
    ("data.packing=documents", "data_parallel.strategy=optimizer"),
    ("optimizer.qk_clip={threshold: 0.01}", "optimizer.name=muon"),
]


@pytest.mark.parametrize(("options", "graphs"), sample(product(RUNS, ("step", "layer")), every=3))
def test_a_run_with_graphs_has_the_bits_of_one_without(
    graphs, options, tiny, tmp_path, losses, weights, capsys
) -> None:
    tiny.run(tmp_path / "eager", *STEPS, *options)
    capsys.readouterr()
    tiny.run(tmp_path / "run", f"training.cuda_graphs={graphs}", *STEPS, *options)
    said = capsys.readouterr().out
    assert losses(tmp_path / "run") == losses(tmp_path / "eager")
    found, expected = weights(tmp_path / "run", 3), weights(tmp_path / "eager", 3)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    said, eager = " ".join(said.split()), "optimizer.name=muon" in options
    unit = "layer" if graphs == "layer" else "stage"
    unit += ", and the optimizer's step" if graphs == "step" and not eager else ""
    assert f"forward and backward of each {unit}, from the second step on; on a CPU they" in said
    assert ("the optimizer's step runs eagerly; step captures it" in said) == (graphs == "layer")
    assert said.count("the optimizer's step runs eagerly: QK-clip") == (graphs == "step" and eager)
    assert said.count("runs eagerly:") == (graphs == "step" and eager)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            ("training.dtype=bf16", "optimizer.ema=0.9", "optimizer.masters=remainder"), id="bf16"
        ),
        pytest.param(
            ("training.dtype=fp16", "optimizer.loss_scale={initial: 1e6}"),
            id="fp16",
        ),
        pytest.param(
            ("optimizer.skip_above=1.4", "logging.zeros=true", "logging.gradients=true"),
            id="skipped",
            marks=pytest.mark.campaign,
        ),
    ],
)
def test_captured_steps_of_the_optimizer_change_rates_and_leave_steps_out(
    options, tiny, tmp_path, losses, weights
) -> None:
    given = ("training.steps=10", "optimizer.warmup=3", "optimizer.schedule=constant")
    given = (*given, "checkpoint.every=5", *options)
    tiny.run(tmp_path / "eager", *given)
    tiny.run(tmp_path / "run", *given, "training.cuda_graphs=step")
    tiny.run(tmp_path / "parts", *given, "training.cuda_graphs=step", "training.steps=5")
    tiny.run(tmp_path / "parts", *given, "training.cuda_graphs=step")
    rows = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("eager", "run")
    ]
    kept = [
        [{k: v for k, v in row.items() if k not in CLOCKS} for row in each if "loss" in row]
        for each in rows
    ]
    assert kept[0] == kept[1]
    if "training.dtype=bf16" not in options:
        assert 0 < kept[1][-1]["skipped_steps"] < 10
    for name in ("run", "parts"):
        assert losses(tmp_path / name) == losses(tmp_path / "eager")
        found, expected = weights(tmp_path / name, 10), weights(tmp_path / "eager", 10)
        for key, value in found.items():
            np.testing.assert_array_equal(value, expected[key], err_msg=key)


def test_why_a_stage_is_not_captured_is_said_once(tiny, tmp_path, losses, capsys) -> None:
    options = (*STEPS, "model.kernels=fused")
    tiny.run(tmp_path / "eager", *options)
    tiny.run(tmp_path / "run", "training.cuda_graphs=step", *options)
    said = capsys.readouterr().out.replace("\n", " ")
    assert losses(tmp_path / "run") == losses(tmp_path / "eager")
    assert said.count("has the host read a tensor") == 1


def test_sinks_of_replays_count_and_overwrite_as_the_buffer_does() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    buffer = GradBuffer([("weight", weight)], group=None)
    sinks = GraphSinks(buffer.sink)
    sink, around = sinks.sink(weight), sinks.around([weight])

    def backward(grad: float) -> None:
        out, adds = sink.begin()
        out.add_(grad) if adds else out.fill_(grad)
        sink.end()

    buffer.start(2)
    backward(1.0)  # eagerly
    backward(2.0)
    buffer.finish()
    buffer.start(2)
    for grad in (3.0, 4.0):  # as replays
        around(True)
        weight.main_grad.add_(grad)
        around(False)
    buffer.finish()
    assert weight.main_grad.tolist() == [7.0] * 3
    with pytest.raises(RuntimeError, match="outside of start"):
        around(True)
    buffer.close()
