"""Losses that stages before the last one add, against plain autograd without a pipeline."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from mt_pipeline import Executor, StageError
from mt_schedule import make_schedule
from stages import WIDTH, make_batches, spec, split_backwards
from torch import nn

WEIGHTS = {"y": 1.0, "aux": 0.3, "z": -0.02}


class Lossy(nn.Module):
    """A stage with two losses of its own, one of which only its first part knows."""

    def __init__(self, number, *, last):
        super().__init__()
        torch.manual_seed(number)
        self.first, self.second = (nn.Linear(WIDTH, WIDTH).double() for _ in range(2))
        self.router = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.number, self.last = number, last

    def forward(self, x, batch):
        return self.finish(self.behind(self.before(batch if x is None else x)), batch)

    def before(self, x):
        h = torch.tanh(self.first(x))
        return h, {"aux": (h @ self.router).square().sum()} if self.number != 1 else {}

    def behind(self, state):
        h, losses = state
        h = h + self.second(h)
        return h, {**losses, "z": (h * self.router).logsumexp(-1).sum()}

    def finish(self, state, batch):
        h, losses = state
        return {"y": (h * batch.cos()).sum(), **losses} if self.last else (h, losses)


class Parted(Lossy):
    def parts(self, batch):
        return [
            lambda x: self.before(batch if x is None else x),
            self.behind,
            partial(self.finish, batch=batch),
        ]


def objective(losses, _):
    return sum(WEIGHTS[name] * value for name, value in losses.items())


def unpipelined(depth, batches):
    stages = [Lossy(number, last=number == depth - 1) for number in range(depth)]
    totals = dict.fromkeys(WEIGHTS, 0.0)
    for batch in batches:
        x = None
        for stage in stages:
            output = stage(x, batch)
            x, losses = (None, output) if stage.last else output
            objective(losses, batch).backward(retain_graph=not stage.last)
            for name, value in losses.items():
                totals[name] += value.item()
    return totals, [[p.grad for p in stage.parameters()] for stage in stages]


def is_last(schedule, number):
    return number % schedule.depth == schedule.depth - 1


def on_rank(schedule, kind):
    stages = [
        kind(number % schedule.depth, last=is_last(schedule, number))
        for number in schedule.stages_of(dist.get_rank())
    ]
    batches = make_batches(schedule.microbatches)
    executor = Executor(schedule, stages, group=dist.group.WORLD, activation=spec)
    outputs = [*executor.run(batches, objective=objective), *executor.inner_losses.values()]
    weighed = sum(sum(WEIGHTS[name] * value for name, value in each.items()) for each in outputs)
    torch.testing.assert_close(torch.as_tensor(sum(executor.losses)), torch.as_tensor(weighed))
    assert not any(loss.requires_grad for loss in executor.losses)
    grads = [(stage.number, [p.grad for p in stage.parameters()]) for stage in stages]
    inner = {stage for stage in schedule.stages_of(dist.get_rank()) if not is_last(schedule, stage)}
    assert {stage for _, stage in executor.inner_losses} == inner
    evaluated = [*executor.evaluate(batches), *executor.inner_losses.values()]
    assert executor.evaluate([]) == []
    assert not executor.inner_losses
    return outputs, evaluated, grads


def summed(outputs):
    values = [(name, value.item()) for output in outputs for name, value in output.items()]
    return {name: sum(v for n, v in values if n == name) for name, _ in values}


def assert_equal_to_unpipelined(results, schedule):
    totals, expected = unpipelined(schedule.depth, make_batches(schedule.microbatches))
    for outputs in zip(*((run, evaluation) for run, evaluation, _ in results), strict=True):
        flat = [output for of_rank in outputs for output in of_rank]
        assert not any(value.requires_grad for output in flat for value in output.values())
        assert summed(flat) == pytest.approx(totals, rel=1e-12)
    got = [[0.0] * len(grads) for grads in expected]
    for _, _, of_rank in results:
        for number, grads in of_rank:  # with two directions each stage has a part on two ranks
            got[number] = [a + b for a, b in zip(got[number], grads, strict=True)]
    for ours, theirs in zip(got, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [Lossy, Parted])
@pytest.mark.parametrize(
    ("name", "ranks_of", "options"),
    [
        ("gpipe", 2, {}),
        ("1f1b", 4, {}),
        ("1f1b", 2, {"overlap": True}),
        ("interleaved", 2, {"chunks": 2}),
        ("zb-h1", 2, {}),
        ("zb-v", 2, {}),
        ("v-half", 4, {}),
        ("dualpipe", 2, {}),
        ("dualpipe", 4, {}),
        ("dualpipe-v", 2, {}),
    ],
)
def test_losses_of_inner_stages_are_those_without_a_pipeline(ranks, kind, name, ranks_of, options):
    schedule = make_schedule(name, ranks_of, 2 * ranks_of, **options)
    assert_equal_to_unpipelined(ranks(ranks_of, on_rank, schedule, kind), schedule)


@pytest.mark.parametrize("kind", [Lossy, Parted])
def test_losses_of_inner_stages_go_with_backwards_split_anywhere(ranks, kind):
    schedule = split_backwards(make_schedule("1f1b", 2, 4), later=2)
    assert_equal_to_unpipelined(ranks(2, on_rank, schedule, kind), schedule)


def test_a_loss_of_weights_alone_needs_no_activation(ranks):
    def body():
        rank, weight = dist.get_rank(), nn.Parameter(torch.ones(3).double())

        def stage(x, batch):
            if rank == 1:
                return {"y": (x * batch.cos()).sum()}
            return batch * 1.0, {"aux": weight.square().sum()}

        for schedule in (make_schedule("1f1b", 2, 3), make_schedule("zb-h1", 2, 3)):
            weight.grad = None
            executor = Executor(schedule, stage, group=dist.group.WORLD, activation=spec)
            executor.run(make_batches(3), objective=objective)
            if rank == 0:
                torch.testing.assert_close(weight.grad, torch.full((3,), 3 * 2 * 0.3).double())

    ranks(2, body)


def test_generation_takes_no_losses(ranks):
    def body():
        def stage(x, batch):
            return batch if x is None else x * 2, {"aux": batch.sum()}

        def last(x, batch):
            return x * 2

        executor = Executor(
            make_schedule("1f1b", 2, 2),
            last if dist.get_rank() else stage,
            group=dist.group.WORLD,
            activation=spec,
        )
        batches = make_batches(2)
        for output, batch in zip(executor.infer(batches, output=spec), batches, strict=True):
            assert torch.equal(output, batch * 2)

    ranks(2, body)


WRONG = {
    "no number": (
        {"aux": torch.ones(2)},
        objective,
        "loss 'aux' of a stage must be a tensor with one floating-point number, got a (2,) tensor "
        "of torch.float32",
    ),
    "no tensor": ({"aux": 0.5}, objective, "one floating-point number, got float; sum it"),
    "unknown": (
        {"zz": torch.ones(())},
        objective,
        "the objective, called with the losses zz of this stage, raised KeyError: 'zz'",
    ),
    "no gradient": (
        {"aux": torch.ones((), requires_grad=True)},
        lambda losses, _: objective(losses, _).detach(),
        "the objective's value for a stage's own losses ('aux') has no gradient",
    ),
    "a function": (
        {"aux": torch.ones((), requires_grad=True)},
        lambda losses, _: lambda: losses["aux"],
        "must return one number for a stage's own losses ('aux'), got function",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_loss_is_named_on_every_rank(ranks, case):
    losses, weigh, expected = WRONG[case]

    def body():
        def stage(x, batch):
            return {"y": (x * batch.cos()).sum()} if x is not None else (batch * 1.0, losses)

        executor = Executor(
            make_schedule("1f1b", 2, 2), stage, group=dist.group.WORLD, activation=spec
        )
        with pytest.raises(StageError) as caught:
            executor.run(make_batches(2), objective=weigh)
        return str(caught.value)

    for message in ranks(2, body):
        assert message.startswith("stage 0 on pipeline rank 0 failed in the forward")
        assert expected in message
