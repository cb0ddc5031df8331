"""A model's stages take turns in overlapped pairs, and the numbers are those of whole stages."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from mt_model import GPT, gpt
from mt_parallel_state import ParallelLayout, ParallelState
from mt_pipeline import Executor, SplitStage, TensorSpec, make_schedule
from mt_schedule import split_layers

F64, LENGTH, HIDDEN = torch.float64, 8, 16


class Whole:
    """The same stage, which does not offer its parts."""

    def __init__(self, stage):
        self.stage = stage

    def __call__(self, x, batch):
        return self.stage(x, batch)


def batches(number):
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, 32, (number, 2, LENGTH + 1), generator=generator)
    return [
        {
            "tokens": rows[:, :-1].clone(),
            "labels": rows[:, 1:].clone(),
            "sample_ids": torch.tensor([2 * i, 2 * i + 1]),
        }
        for i, rows in enumerate(drawn)
    ]


def logged(stage, log, *, again):
    """Note when mixers and feed-forwards run, forward (not when they run again) and backward."""

    def forward(*_):
        if torch.is_grad_enabled() != again:
            log.append("F")

    for layer in stage.stage_layers():
        for module in (layer.mixer, layer.feed_forward):
            module.register_forward_hook(forward)
            module.register_full_backward_hook(lambda *_: log.append("B"))
    return stage


def trained(schedule, state, *, in_parts, recompute, log, blocks):
    config = gpt(
        vocab_size=32,
        hidden_size=HIDDEN,
        num_layers=8,
        num_heads=2,
        max_sequence_length=LENGTH,
        dropout=0.1,
        tied=False,
        **blocks,
    )
    cuts = split_layers(config.num_layers, schedule.depth)
    stages = [
        GPT(config, state, layers=cuts[s % schedule.depth], recompute=recompute, seed=3, dtype=F64)
        for s in schedule.stages_of(state.index("pp"))
    ]
    given = [logged(stage, log, again=recompute == "full") for stage in stages]
    executor = Executor(
        schedule,
        given if in_parts else [Whole(stage) for stage in given],
        group=state.group("pp"),
        activation=lambda batch: TensorSpec((2, LENGTH, HIDDEN), F64),
    )
    outputs = executor.run(batches(schedule.microbatches), objective=lambda out, _: out["lm"])
    grads = [p.grad for stage in stages for p in stage.parameters()]
    return [*(out["lm"] for out in outputs), *grads]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v", "dualpipe without pairs"])
def test_stages_of_a_model_take_turns_in_the_pairs_of_a_schedule_that_has_some(
    ranks, name, recompute
):
    def body():
        schedule = make_schedule(name.split()[0], stages=2, microbatches=8)
        if "without" in name:
            schedule = replace(schedule, pairs=frozenset())
        results, logs = [], []
        with ParallelState(ParallelLayout(pp=2)) as state:
            assert issubclass(GPT, SplitStage)
            for in_parts in (False, True):
                logs.append([])
                how = {"in_parts": in_parts, "recompute": recompute, "log": logs[-1], "blocks": {}}
                results.append(trained(schedule, state, **how))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
        return logs

    for whole, parts in ranks(2, body):
        assert sorted(whole) == sorted(parts)
        turns = [sum(a != b for a, b in itertools.pairwise(log)) for log in (whole, parts)]
        if "without" in name:
            assert whole == parts
        else:
            assert turns[1] > 1.5 * turns[0]


@pytest.mark.parametrize(
    "blocks",
    [
        {"norms": "sandwich", "residual_scale": 0.5, "z_loss": 0.1},
        {"norms": "post"},
        {"parallel": True, "shared_norm": True},
        {"parallel": True},
    ],
    ids=str,
)
def test_layers_of_every_structure_are_the_same_in_parts(ranks, blocks):
    def body():
        schedule = make_schedule("dualpipe", stages=2, microbatches=8)
        with ParallelState(ParallelLayout(pp=2)) as state:
            how = {"recompute": "selective", "log": [], "blocks": blocks}
            whole, parts = (trained(schedule, state, in_parts=p, **how) for p in (False, True))
        for a, b in zip(whole, parts, strict=True):
            assert torch.equal(a, b)

    ranks(2, body)
