"""Recomputed pipeline stages that draw from the streams of tensor parallelism."""

import dataclasses

import torch
from mt_pipeline import Executor, Mark, Op, make_schedule
from mt_tensor_parallel import RngStreams
from torch import nn

WIDTH = 6


def run(*, marked):
    """Gradients of two stages on one rank, and what the streams draw after the run."""
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH).double() for _ in range(2)]
    streams = RngStreams()
    streams.add("inside", 7)

    def drop(x):
        with streams.use("inside"):
            return nn.functional.dropout(x, 0.4)

    schedule = make_schedule("interleaved", stages=1, microbatches=3, chunks=2)
    forwards = [action for _, _, action in schedule if action.op is Op.F and marked]
    marks = frozenset((Mark.RECOMPUTE, action) for action in forwards)
    executor = Executor(
        dataclasses.replace(schedule, marks=marks),
        [
            lambda x, batch, layer=layer: drop(torch.tanh(layer(batch if x is None else x)))
            for layer in layers
        ],
        group=None,
        rng=streams,
    )
    batches = [torch.randn(4, WIDTH, dtype=torch.float64) for _ in range(3)]
    executor.run(batches, objective=lambda y, batch: (drop(y) * batch).sum())
    return [*(p.grad for layer in layers for p in layer.parameters()), drop(torch.ones(9))]


def test_recomputed_stages_repeat_the_draws_of_named_streams():
    for kept, again in zip(run(marked=False), run(marked=True), strict=True):
        assert torch.equal(kept, again)
