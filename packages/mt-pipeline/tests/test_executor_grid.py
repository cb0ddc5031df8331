"""Every schedule in the executor against the model without a pipeline, in fp64, bit for bit.

The model has tied embeddings, layers that do not divide evenly, dropout, and micro-batches of
different lengths. CI runs a seeded sample; the campaign runs the whole grid.
"""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from mt_pipeline import Executor, TensorSpec
from mt_schedule import Action, Op, defer_weights, make_schedule, split_layers
from stages import split_backwards
from torch import nn

WIDTH, VOCABULARY = 6, 11
SCHEDULES = [
    ("gpipe", {}),
    ("1f1b", {}),
    ("interleaved", {"chunks": 2}),
    ("1f1b", {"overlap": True}),
    ("interleaved", {"chunks": 3}),
    ("interleaved", {"chunks": 2, "overlap": True}),
    ("bfs", {"chunks": 2}),
    ("zb-h1", {}),
    ("zb-h2", {}),
    ("zb-v", {}),
    ("v-half", {}),
    ("v-min", {}),
    ("dualpipe", {}),
    ("dualpipe-v", {}),
]
MICROBATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
DEFERRED = ("", "all", "some")  # weight gradients put off to the rank's end


class Layer(nn.Module):
    """A residual block whose dropout depends on the layer and the micro-batch alone."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x, batch):
        h = self.down(torch.tanh(self.up(self.norm(x))))
        generator = torch.Generator().manual_seed(1000 * self.number + batch["number"])
        keep = torch.rand(h.shape, generator=generator) > 0.25
        return x + h * keep / 0.75


class Part(nn.Module):
    """A stage: the embedding, some layers, the head, or several of these."""

    def __init__(self, layers, *, embedding=None, head=None):
        super().__init__()
        self.embedding, self.head = embedding, head
        self.layers = nn.ModuleList(layers)

    def forward(self, x, batch):
        if self.embedding is not None:
            x = nn.functional.embedding(batch["tokens"], self.embedding)
        for layer in self.layers:
            x = layer(x, batch)
        if self.head is None:
            return x
        return {"logits": x @ self.head.t(), "hidden": [x]}


def make_parts(stages, number_of_layers):
    """The stages, with two copies of the tied embedding."""
    torch.manual_seed(5)
    table = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64)
    layers = [Layer(i).double() for i in range(number_of_layers)]
    return [
        Part(
            [layers[i] for i in part],
            embedding=nn.Parameter(table.clone()) if stage == 0 else None,
            head=nn.Parameter(table.clone()) if stage == stages - 1 else None,
        )
        for stage, part in enumerate(split_layers(number_of_layers, stages))
    ]


def make_batches(number):
    torch.manual_seed(6)
    return [
        {"number": i, "tokens": torch.randint(VOCABULARY, (2, 3 + i % 3))} for i in range(number)
    ]


def spec(batch):
    return TensorSpec((*batch["tokens"].shape, WIDTH), torch.float64)


def objective(output, batch):
    logits = output["logits"].flatten(0, 1)
    return nn.functional.cross_entropy(logits, batch["tokens"].roll(-1, 1).flatten())


def reference(stages, number_of_layers, batches):
    """Each micro-batch's loss and gradients, of one process and without a pipeline."""
    parts = make_parts(stages, number_of_layers)
    losses, gradients = [], []
    for batch in batches:
        for part in parts:
            part.zero_grad()
        x = None
        for part in parts:
            x = part(x, batch)
        loss = objective(x, batch)
        loss.backward()
        losses.append(loss.detach())
        gradients.append([[p.grad.clone() for p in part.parameters()] for part in parts])
    return losses, gradients


def order_of(schedule, stage):
    """The micro-batches of a stage in the order in which weights get their gradients."""
    actions = schedule.ranks[schedule.stage_ranks[stage]]
    return [a.microbatch for a in actions if a.op in (Op.B, Op.W) and a.stage == stage]


def deferring(schedule, which):
    if not which:
        return schedule
    weights = [action for _, _, action in schedule if action.op in (Op.B, Op.W)]
    some = random.Random(1).sample(weights, len(weights) // 2)
    return defer_weights(schedule, None if which == "all" else some)


def assert_equals_unpipelined(schedule, *, deferred, layers_over, group, batch_p2p):
    schedule = deferring(schedule, deferred)
    number_of_layers = schedule.depth + layers_over
    batches = make_batches(schedule.microbatches)
    losses, gradients = reference(schedule.depth, number_of_layers, batches)
    rank = dist.get_rank(group)
    held = schedule.stages_of(rank)
    mine = [make_parts(schedule.depth, number_of_layers)[s % schedule.depth] for s in held]
    executor = Executor(
        schedule,
        mine if len(mine) > 1 else mine[0],
        group=group,
        activation=spec,
        batch_p2p=batch_p2p,
    )
    outputs = executor.run(batches, objective=objective)
    for stage, part in zip(held, mine, strict=True):
        order = order_of(schedule, stage)
        assert sorted(order) == list(schedule.microbatches_of(stage))
        for index, parameter in enumerate(part.parameters()):
            expected = torch.zeros_like(parameter)
            for number in order:
                expected = expected + gradients[number][stage % schedule.depth][index]
            assert torch.equal(parameter.grad, expected), (stage, index)
    expected = [
        number
        for stage in held
        if schedule.next_stage(stage) is None
        for number in schedule.microbatches_of(stage)
    ]
    assert len(outputs) == len(expected)
    for number, output in zip(sorted(expected), outputs, strict=True):
        assert torch.equal(objective(output, batches[number]), losses[number])
        assert not output["hidden"][0].requires_grad


def grid():
    """Every combination that a schedule takes."""
    for (name, options), ranks, number in itertools.product(SCHEDULES, (2, 3, 4), MICROBATCHES):
        try:
            make_schedule(name, stages=ranks, microbatches=number, **options)
        except ValueError:
            continue  # it says what it takes; its own tests are about that
        for deferred, over, batched in itertools.product(DEFERRED, (0, 1, 3), (False, True)):
            yield ranks, name, options, number, deferred, over, batched


def sample():
    """For every schedule and number of ranks some combinations, always with m no multiple of p."""
    chosen = random.Random(20)
    cases = sorted(grid(), key=lambda case: (case[0], case[1], str(case)))
    for _, group in itertools.groupby(cases, key=lambda case: (case[0], case[1])):
        group = list(group)
        odd = [case for case in group if case[3] % case[0]] or group
        yield from [chosen.choice(group), chosen.choice(odd)]


def run_cases(ranks, world, cases):
    def body():
        for _, name, options, number, deferred, over, batched in cases:
            schedule = make_schedule(name, stages=world, microbatches=number, **options)
            try:
                assert_equals_unpipelined(
                    schedule,
                    deferred=deferred,
                    layers_over=over,
                    group=dist.group.WORLD,
                    batch_p2p=batched,
                )
            except Exception as error:
                raise AssertionError(f"{name} {options} m={number} {deferred} {over}") from error

    ranks(world, body, timeout=600)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_sample_of_all_schedules_equals_the_model_without_a_pipeline(ranks, world):
    cases = [case for case in sample() if case[0] == world]
    assert {case[1] for case in cases} >= {"1f1b"}
    run_cases(ranks, world, cases)


@pytest.mark.campaign
@pytest.mark.parametrize(("world", "name"), sorted({case[:2] for case in grid()}))
def test_all_schedules_equal_the_model_without_a_pipeline(ranks, world, name):
    cases = [case for case in grid() if case[:2] == (world, name)]
    run_cases(ranks, world, cases)


@pytest.mark.parametrize("deferred", DEFERRED)
@pytest.mark.parametrize("world", [2, 4])
def test_any_schedule_with_its_backwards_split_gives_the_same(ranks, world, deferred):
    def body():
        for number, later in itertools.product((2, 5), (0, 1, 3, 99)):
            schedule = split_backwards(make_schedule("1f1b", world, number), later)
            assert Action(Op.W, 0, number - 1) in schedule.ranks[0]
            assert_equals_unpipelined(
                schedule, deferred=deferred, layers_over=1, group=dist.group.WORLD, batch_p2p=None
            )

    ranks(world, body)


@pytest.mark.parametrize("world", [2, 4])
def test_the_two_copies_under_dualpipe_get_the_gradient_of_all_microbatches(ranks, world):
    def body():
        schedule = make_schedule("dualpipe", stages=world, microbatches=2 * world)
        batches = make_batches(schedule.microbatches)
        _, gradients = reference(schedule.depth, schedule.depth, batches)
        rank = dist.get_rank()
        groups = [dist.new_group([r, world - 1 - r]) for r in range(world // 2)]
        held = schedule.stages_of(rank)
        mine = [make_parts(schedule.depth, schedule.depth)[s % schedule.depth] for s in held]
        Executor(schedule, mine, group=dist.group.WORLD, activation=spec).run(
            batches, objective=objective
        )
        for stage, part in sorted(
            zip(held, mine, strict=True), key=lambda pair: pair[0] % schedule.depth
        ):
            index = stage % schedule.depth
            for at, parameter in enumerate(part.parameters()):
                dist.all_reduce(parameter.grad, group=groups[min(rank, world - 1 - rank)])
                sums = []
                for each in schedule.replicas_of(stage):
                    total = torch.zeros_like(parameter)
                    for number in order_of(schedule, each):
                        total = total + gradients[number][index][at]
                    sums.append(total)
                assert torch.equal(parameter.grad, sums[0] + sums[1])

    ranks(world, body)
