"""Toy stages, and the executor on them against the same model without a pipeline, bit for bit."""

import dataclasses

import torch
import torch.distributed as dist
from mt_pipeline import Executor, TensorSpec
from mt_schedule import Op, Schedule, split_layers
from torch import nn

WIDTH = 6


def make_layers(number: int) -> list[nn.Module]:
    torch.manual_seed(7)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)).double()
        for _ in range(number)
    ]


def make_batches(number: int, *, lengths: bool = True) -> list[torch.Tensor]:
    """Micro-batches of different sequence lengths."""
    torch.manual_seed(11)
    return [torch.randn(2, 3 + (i % 3) * lengths, WIDTH).double() for i in range(number)]


def spec(batch):
    return TensorSpec(tuple(batch.shape), batch.dtype)


def objective(output, batch):
    return (output["y"] * batch.cos()).sum()


def make_stage(layers: list[nn.Module], *, last: bool):
    def stage(x, batch):
        h = batch if x is None else x
        for layer in layers:
            h = layer(h)
        return {"y": h, "parts": [h.sum(), (h.mean(), 3)]} if last else h

    return stage


def grads(layers) -> list[torch.Tensor]:
    return [parameter.grad for layer in layers for parameter in layer.parameters()]


def unpipelined(number_of_layers: int, batches):
    layers = make_layers(number_of_layers)
    stage = make_stage(layers, last=True)
    losses = []
    for batch in batches:
        loss = objective(stage(None, batch), batch)
        loss.backward()
        losses.append(loss.detach())
    return losses, layers


def make_executor(schedule: Schedule, number_of_layers: int, *, group, batch_p2p=None):
    layers = make_layers(number_of_layers)
    rank = 0 if group is None else dist.get_rank(group)
    held = schedule.stages_of(rank)
    split = split_layers(number_of_layers, schedule.stages)
    mine = [[layers[i] for i in split[stage]] for stage in held]
    stages = [
        make_stage(part, last=stage == schedule.stages - 1)
        for stage, part in zip(held, mine, strict=True)
    ]
    executor = Executor(
        schedule,
        stages if len(stages) > 1 else stages[0],
        group=group,
        activation=spec,
        batch_p2p=batch_p2p,
    )
    numbers = [i for stage in held for i in split[stage]]
    return executor, layers, numbers


def assert_matches_unpipelined(schedule, *, group, batch_p2p=None, number_of_layers=5, steps=1):
    batches = make_batches(schedule.microbatches)
    executor, layers, numbers = make_executor(
        schedule, number_of_layers, group=group, batch_p2p=batch_p2p
    )
    losses, reference = unpipelined(number_of_layers, batches)
    for _ in range(steps):
        for layer in layers:
            layer.zero_grad()
        outputs = executor.run(batches, objective=objective)
        for i in numbers:
            for ours, theirs in zip(grads([layers[i]]), grads([reference[i]]), strict=True):
                assert torch.equal(ours, theirs)
        untouched = [
            g for i, layer in enumerate(layers) if i not in numbers for g in grads([layer])
        ]
        assert all(g is None for g in untouched)
    if schedule.stages - 1 not in schedule.stages_of(executor.rank):
        assert outputs == []
        return
    assert len(outputs) == schedule.microbatches
    for loss, output, batch in zip(losses, outputs, batches, strict=True):
        assert torch.equal(objective(output, batch), loss)
        assert not output["y"].requires_grad
        assert not output["parts"][0].requires_grad
        assert output["parts"][1][1] == 3


def split_backwards(schedule, later=0):
    """The same schedule with each B cut into I and W, where W waits for `later` more actions."""
    ranks = []
    for actions in schedule.ranks:
        done, waiting = [], []
        for action in actions:
            done.append(action._replace(op=Op.I) if action.op is Op.B else action)
            waiting = [(w, left - 1) for w, left in waiting]
            if action.op is Op.B:
                waiting.append((action._replace(op=Op.W), later))
            while waiting and waiting[0][1] <= 0:
                done.append(waiting.pop(0)[0])
        ranks.append((*done, *(w for w, _ in waiting)))
    return dataclasses.replace(schedule, ranks=tuple(ranks), peak_activations=None)
