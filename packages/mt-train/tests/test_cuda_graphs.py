"""Steps of replayed graphs; on a CPU, eager ones that are held to the rules of a graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mt_data_parallel import GradBuffer
from mt_train.graph_sinks import GraphSinks

STEPS = ("training.steps=3", "training.micro_batch_size=2")


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("model.dropout=0.1", "model.tied=true"),
        ("data.packing=documents", "data_parallel.strategy=optimizer"),
        ("optimizer.qk_clip={threshold: 0.01}", "optimizer.name=muon"),
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("graphs", ["layer", "step"])
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
    unit = "layer" if graphs == "layer" else "stage"
    assert f"forward and backward of each {unit}, from the second step on; on a CPU they" in said
    assert "the optimizer runs eagerly, as the host decides on each step" in said
    assert "runs eagerly:" not in said


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
