"""What a stage may offer: parts that take turns, weight gradients that wait."""

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist
from mt_parallel_state import WgradStore
from mt_pipeline import DefersWeightGradients, Executor, SplitStage
from mt_schedule import Action, Op, Schedule, make_schedule
from stages import spec, split_backwards
from torch import nn

WIDTH = 6


def objective(output, batch):
    return (output * batch.cos()).sum()


def make_batches(number):
    torch.manual_seed(11)
    return [torch.randn(2, 3 + i % 2, WIDTH, dtype=torch.float64) for i in range(number)]


class Exchange(torch.autograd.Function):
    """Half of an all-to-all: what starts it forward waits for it backward."""

    @staticmethod
    def forward(ctx, x, event, back, log):
        ctx.event = (back, log)
        log.append(event)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        back, log = ctx.event
        log.append(back)
        return grad, None, None, None


class MoE(nn.Module):
    """Attention, experts and combine, with a residual from the first part to the last."""

    def __init__(self, number, log):
        super().__init__()
        torch.manual_seed(number)
        self.attention, self.experts, self.combine = (
            nn.Linear(WIDTH, WIDTH).double() for _ in range(3)
        )
        self.log = log

    def forward(self, x, batch):
        state = x
        for part in self.parts(batch):
            state = part(state)
        return state

    def parts(self, batch):
        def attention(x):
            h = torch.tanh(self.attention(batch if x is None else x))
            return h, self.send(h, "dispatch")

        def experts(state):
            residual, x = state
            return residual, self.send(
                torch.tanh(self.experts(self.take(x, "dispatch"))), "combine"
            )

        def combine(state):
            residual, x = state
            return residual + self.combine(self.take(x, "combine") * residual)

        return [attention, experts, combine]

    def send(self, x, what):
        return Exchange.apply(x, f"start {what}", f"B wait {what}", self.log)

    def take(self, x, what):
        return Exchange.apply(x, f"wait {what}", f"B start {what}", self.log)


class Nested(MoE):
    """Its parts hand on dicts, lists and tuples in each other."""

    def parts(self, batch):
        attention, experts, combine = super().parts(batch)

        def nest(state):
            residual, x = state
            return {"residual": [residual], "moe": ({"x": x, "rows": len(x)}, None)}

        def flat(state):
            assert state["moe"][0]["rows"] == len(batch)
            return state["residual"][0], state["moe"][0]["x"]

        return [
            lambda x: nest(attention(x)),
            lambda state: nest(experts(flat(state))),
            lambda state: combine(flat(state)),
        ]


class Whole(nn.Module):
    """The same stage, which does not offer its parts."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def forward(self, x, batch):
        return self.stage(x, batch)


def one_rank(*, split):
    """Two micro-batches of one stage, the second's forward overlapped with the first's backward."""
    op = Op.I if split else Op.B
    tail = (Action(Op.W, 0, 0),) if split else ()
    last = (Action(op, 0, 1), *((Action(Op.W, 0, 1),) if split else ()))
    return Schedule(
        name="pair",
        stages=1,
        microbatches=2,
        ranks=((Action(Op.F, 0, 0), Action(Op.F, 0, 1), Action(op, 0, 0), *tail, *last),),
        pairs=frozenset({(Action(Op.F, 0, 1), Action(op, 0, 0))}),
    )


def run_alone(schedule, stage):
    batches = make_batches(schedule.microbatches)
    outputs = Executor(schedule, stage, group=None).run(batches, objective=objective)
    return outputs, [p.grad for p in stage.parameters()]


@pytest.mark.parametrize("split", [False, True])
def test_the_parts_of_an_overlapped_pair_take_turns(split):
    assert isinstance(MoE(0, []), SplitStage)
    assert not isinstance(Whole(MoE(0, [])), SplitStage)
    log = []
    run_alone(one_rank(split=split), MoE(0, log))
    first = ["start dispatch", "wait dispatch", "start combine", "wait combine"]
    last = ["B start combine", "B wait combine", "B start dispatch", "B wait dispatch"]
    # Between the start of each all-to-all and its wait stands the other micro-batch's part.
    turns = [
        *("start dispatch", "B start combine"),
        *("wait dispatch", "start combine", "B wait combine", "B start dispatch"),
        *("wait combine", "B wait dispatch"),
    ]
    assert log == [*first, *turns, *last]


@pytest.mark.parametrize("split", [False, True])
def test_turns_change_no_gradient(split):
    schedule = one_rank(split=split)
    outputs, gradients = run_alone(schedule, MoE(0, []))
    plain = dataclasses.replace(schedule, pairs=frozenset())
    for other, stage in [(schedule, Whole(MoE(0, []))), (plain, MoE(0, []))]:
        theirs, expected = run_alone(other, stage)
        for a, b in zip([*outputs, *gradients], [*theirs, *expected], strict=True):
            assert torch.equal(a, b)


def test_parts_may_hand_on_a_nest_of_tensors(ranks):
    def body():
        schedule = make_schedule("dualpipe-v", stages=2, microbatches=6)
        results = []
        for kind in (MoE, Nested):
            mine = [kind(stage, []) for stage in schedule.stages_of(dist.get_rank())]
            executor = Executor(schedule, mine, group=dist.group.WORLD, activation=spec)
            executor.run(make_batches(6), objective=objective)
            results.append([p.grad for stage in mine for p in stage.parameters()])
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)

    ranks(2, body)


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v"])
@pytest.mark.parametrize("world", [2, 4])
def test_overlapped_pairs_across_ranks_change_no_gradient(ranks, world, name):
    def body():
        schedule = make_schedule(name, stages=world, microbatches=4 * world)
        assert schedule.pairs
        held = schedule.stages_of(dist.get_rank())
        results = []
        for offers_parts in (False, True):
            log = []
            mine = [MoE(stage % schedule.depth, log) for stage in held]
            executor = Executor(
                schedule,
                mine if offers_parts else [Whole(stage) for stage in mine],
                group=dist.group.WORLD,
                activation=spec,
            )
            executor.run(make_batches(4 * world), objective=objective)
            results.append([p.grad for stage in mine for p in stage.parameters()])
            alternates = ("start dispatch", "B start combine") in itertools.pairwise(log)
            assert alternates == offers_parts
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)

    ranks(world, body)


OVERLAPPED = [("1f1b", {}), ("interleaved", {"chunks": 2}), ("interleaved", {"chunks": 3})]


@pytest.mark.parametrize(("name", "options"), OVERLAPPED)
@pytest.mark.parametrize("world", [1, 2])
def test_overlapped_1f1b_gives_the_gradients_of_1f1b(ranks, world, name, options):
    def body():
        results = []
        for overlap in (False, True):
            schedule = make_schedule(name, world, 5, overlap=overlap, **options)
            log = []
            mine = [MoE(stage, log) for stage in schedule.stages_of(dist.get_rank())]
            group = dist.group.WORLD if world > 1 else None
            executor = Executor(schedule, mine, group=group, activation=spec)
            outputs = executor.run(make_batches(5), objective=objective)
            gradients = [p.grad for stage in mine for p in stage.parameters()]
            results.append([*outputs, *gradients])
            alternates = ("start dispatch", "B start combine") in itertools.pairwise(log)
            assert alternates == overlap
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)

    ranks(world, body)


class DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        layer, wgrad = ctx.layer, lambda: grad.flatten(0, -2).t() @ x.flatten(0, -2)
        if not layer.wgrad_store.active:
            return grad @ weight, wgrad(), None

        def compute():
            layer.log.append("weight")
            gradient = wgrad()
            weight.grad = gradient if weight.grad is None else weight.grad + gradient

        layer.wgrad_store.put(compute)
        return grad @ weight, None, None


class Deferring(nn.Module):
    """A stage whose layers put their weight gradients into a store."""

    def __init__(self, number):
        super().__init__()
        torch.manual_seed(number)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.norm = nn.LayerNorm(WIDTH).double()
        self.wgrad_store, self.log = WgradStore(), []

    def forward(self, x, batch):
        h = self.norm(batch if x is None else x)
        h.register_hook(lambda _: self.log.append("input"))
        return torch.tanh(DeferredLinear.apply(h, self.weight, self))


def test_weight_gradients_that_layers_defer_wait_for_w(ranks):
    assert isinstance(Deferring(0), DefersWeightGradients)

    def body():
        results = []
        schedule = make_schedule("1f1b", stages=2, microbatches=3)
        for each in (schedule, split_backwards(schedule)):
            stage = Deferring(dist.get_rank())
            executor = Executor(each, stage, group=dist.group.WORLD, activation=spec)
            executor.run(make_batches(3), objective=objective)
            assert not stage.wgrad_store.active
            results.append([p.grad for p in stage.parameters()])
        assert stage.log == ["input", "weight"] * 3
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)

    ranks(2, body)


def test_a_recorded_run_has_the_times_of_all_ranks(ranks):
    def body():
        schedule = split_backwards(make_schedule("1f1b", stages=3, microbatches=4))
        stage = MoE(dist.get_rank(), [])
        executor = Executor(schedule, stage, group=dist.group.WORLD, activation=spec)
        with pytest.raises(ValueError, match=r"no times were recorded: call run\(\.\.\., record"):
            executor.timeline()
        executor.run(make_batches(4), objective=objective, record=True)
        return schedule, executor.timeline()

    results = ranks(3, body)
    schedule, timeline = results[0]
    assert all(other == timeline for _, other in results)
    ends = {span.action: span.end for spans in timeline for span in spans}
    for rank, spans in enumerate(timeline):
        assert tuple(span.action for span in spans) == schedule.ranks[rank]
        assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
        for span in spans:
            assert 0 <= span.start < span.end
            if span.action.op is Op.F and rank:  # a send begins before its F has ended
                assert span.start > ends[Action(Op.F, rank - 1, span.action.microbatch)] - 1e-4
    assert min(spans[0].start for spans in timeline) == 0
