"""Overlapped pairs of a model's stages give the same numbers as whole stages."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from mt_model import GPT, gpt
from mt_parallel_state import ParallelLayout, ParallelState, Pending
from mt_pipeline import Executor, SplitStage, TensorSpec, make_schedule
from mt_schedule import split_layers
from torch import distributed as dist

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
        for module in (layer.mixer, getattr(layer.feed_forward, "experts", layer.feed_forward)):
            module.register_forward_hook(forward)
            module.register_full_backward_hook(lambda *_: log.append("B"))
    return stage


def noted_exchanges(monkeypatch, log):
    """Note when an exchange of tokens or of their gradients begins, and when it is waited for."""
    begin, wait = dist.all_to_all_single, Pending.wait

    def began(out, x, *args, **options):
        if options.get("async_op"):
            log.append("start")
        return begin(out, x, *args, **options)

    def waited(self):
        log.append("wait")
        return wait(self)

    monkeypatch.setattr(dist, "all_to_all_single", began)
    monkeypatch.setattr(Pending, "wait", waited)


def hidden_exchanges(log):
    """How many exchanges have anything else between their start and their wait."""
    starts = [place for place, event in enumerate(log) if event == "start"]
    waits = [place for place, event in enumerate(log) if event == "wait"]
    return sum(wait - start > 1 for start, wait in zip(starts, waits, strict=True))


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
    outputs = executor.run(
        batches(schedule.microbatches), objective=lambda out, _: sum(out.values())
    )
    grads = [p.grad for stage in stages for p in stage.parameters()]
    return [*(out["lm"] for out in outputs), *grads]


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        pytest.param(name, recompute, marks=() if i == j else pytest.mark.campaign)
        for i, name in enumerate(["dualpipe", "dualpipe-v", "dualpipe without pairs"])
        for j, recompute in enumerate(["none", "full", "selective"])
    ],
)
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
        {"parallel": True, "shared_norm": True},
        pytest.param({"norms": "post"}, marks=pytest.mark.campaign),
        pytest.param({"parallel": True}, marks=pytest.mark.campaign),
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


MIXTURE = {"num_experts": 4, "top_k": 2, "shared_size": 8, "aux_loss": 0.01, "router_z_loss": 0.01}


@pytest.mark.parametrize(
    "recompute", [pytest.param("none", marks=pytest.mark.campaign), "selective", "full"]
)
def test_tokens_of_a_mixture_travel_while_another_micro_batch_computes(ranks, recompute):
    def body():
        schedule = make_schedule("dualpipe-v", stages=2, microbatches=6)
        results, logs = [], []
        with ParallelState(ParallelLayout(pp=2, ep=2, dp=2)) as state:
            for in_parts in (False, True):
                logs.append([])
                how = {"in_parts": in_parts, "recompute": recompute, "log": logs[-1]}
                with pytest.MonkeyPatch.context() as patch:
                    noted_exchanges(patch, logs[-1])
                    results.append(trained(schedule, state, blocks={"moe": MIXTURE}, **how))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
        return logs

    for whole, parts in ranks(4, body):
        exchanges = parts.count("start")
        assert whole.count("start") == exchanges
        assert hidden_exchanges(whole) == 0
        in_pairs = 0 if recompute == "full" else exchanges // 2  # and more, of these schedules
        assert hidden_exchanges(parts) >= in_pairs
        assert bool(hidden_exchanges(parts)) == bool(in_pairs)
