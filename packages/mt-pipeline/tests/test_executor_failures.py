"""What fails on one rank is raised on all, and the pipeline goes on after it."""

import dataclasses
import pickle
import re
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from mt_pipeline import Executor, StageError, TensorSpec, TransferError
from mt_schedule import Action, Op, make_schedule
from mt_testing import RankFailure
from stages import spec
from torch import nn

WIDTH = 4


def objective(output, batch):
    return output.square().sum()


class Stage(nn.Module):
    """A stage that raises at a given stage and micro-batch, in the forward or backward."""

    def __init__(self, number):
        super().__init__()
        torch.manual_seed(number)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.number = number
        self.faults = ()

    def forward(self, x, batch):
        y = self.layer(batch if x is None else x)
        for stage, microbatch, backward, text in self.faults:
            if stage == self.number and batch[0, 0] == microbatch:
                if not backward:
                    raise ArithmeticError(text)
                y.register_hook(lambda _, text=text: self.fail(text))
        return y

    def fail(self, text):
        raise ArithmeticError(text)


def batches(number):
    torch.manual_seed(0)
    result = [torch.randn(2, WIDTH) for _ in range(number)]
    for index, batch in enumerate(result):
        batch[0, 0] = index
    return result


def make_executor(schedule, **options):
    mine = [Stage(stage) for stage in schedule.stages_of(dist.get_rank())]
    return mine, Executor(
        schedule,
        mine if len(mine) > 1 else mine[0],
        group=dist.group.WORLD,
        activation=spec,
        **options,
    )


def failure_of(run):
    with pytest.raises(StageError) as caught:
        run()
    error = caught.value
    cause = type(error.__cause__).__name__
    return str(error), (error.stage, error.microbatch, error.op, error.rank), cause


@pytest.mark.parametrize("batch_p2p", [False, True])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_failing_stage_is_named_on_all_ranks_and_the_next_run_works(ranks, world, batch_p2p):
    def body():
        schedule = make_schedule("1f1b", stages=world, microbatches=5)
        mine, executor = make_executor(schedule, batch_p2p=batch_p2p)
        seen = []
        for stage in range(world):
            for microbatch in (0, 2, 4):
                for backward in (False, True):
                    mine[0].faults = [(stage, microbatch, backward, "out of luck")]
                    seen.append(failure_of(lambda: executor.run(batches(5), objective=objective)))
        mine[0].faults = [(world - 1, 1, False, "no evaluation")]
        seen.append(failure_of(lambda: executor.evaluate(batches(3))))
        mine[0].faults = ()
        mine[0].zero_grad()
        executor.run(batches(5), objective=objective)
        again, fresh = make_executor(schedule, batch_p2p=batch_p2p)
        fresh.run(batches(5), objective=objective)
        assert torch.equal(mine[0].layer.weight.grad, again[0].layer.weight.grad)
        return seen

    results = ranks(world, body)
    index = 0
    for stage in range(world):
        for microbatch in (0, 2, 4):
            for direction, op in (("forward", Op.F), ("backward", Op.B)):
                for rank in range(world):
                    text, where, cause = results[rank][index]
                    assert text == (
                        f"stage {stage} on pipeline rank {stage} failed in the {direction} of "
                        f"micro-batch {microbatch}: ArithmeticError: out of luck"
                    )
                    assert where == (stage, microbatch, op, stage)
                    assert cause == ("ArithmeticError" if rank == stage else "NoneType")
                index += 1
    assert {result[-1][0] for result in results} == {
        f"stage {world - 1} on pipeline rank {world - 1} failed in the forward of micro-batch 1: "
        "ArithmeticError: no evaluation"
    }


def test_of_several_failures_the_first_of_the_schedule_is_raised(ranks):
    def body():
        mine, executor = make_executor(make_schedule("1f1b", stages=3, microbatches=4))
        mine[0].faults = [(0, 2, False, "later"), (2, 1, False, "first"), (1, 3, True, "last")]
        return failure_of(lambda: executor.run(batches(4), objective=objective))[0]

    texts = set(ranks(3, body))
    assert len(texts) == 1
    # F2 of stage 0 begins at time 2, F1 of stage 2 at time 3.
    assert "stage 0 on pipeline rank 0 failed in the forward of micro-batch 2" in texts.pop()


def test_a_failure_whose_zeros_make_others_fail_is_the_one_that_is_raised(ranks):
    def body():
        mine, executor = make_executor(make_schedule("1f1b", stages=3, microbatches=4))
        mine[0].faults = [(0, 1, False, "the cause")]
        layer = mine[0].layer

        class Picky(nn.Module):
            def forward(self, x):
                if x.detach().abs().sum() == 0:
                    raise ArithmeticError("the consequence")
                return layer(x)

        mine[0].layer = Picky()
        return failure_of(lambda: executor.run(batches(4), objective=objective))

    for rank, (text, where, cause) in enumerate(ranks(3, body)):
        assert text.endswith("forward of micro-batch 1: ArithmeticError: the cause")
        assert where == (0, 1, Op.F, 0)
        assert cause == ("ArithmeticError" if rank == 0 else "NoneType")


def test_failures_of_split_backwards_are_named(ranks):
    def split(schedule):
        return dataclasses.replace(
            schedule,
            ranks=tuple(
                tuple(
                    each
                    for a in actions
                    for each in (
                        (a._replace(op=Op.I), a._replace(op=Op.W)) if a.op is Op.B else (a,)
                    )
                )
                for actions in schedule.ranks
            ),
        )

    def body():
        mine, executor = make_executor(split(make_schedule("1f1b", stages=2, microbatches=3)))
        seen = []
        for stage in (0, 1):  # the first stage does everything in W
            mine[0].faults = [(stage, 1, True, "out of luck")]
            seen.append(failure_of(lambda: executor.run(batches(3), objective=objective))[0])
        return seen

    first, second = ranks(2, body)
    assert first == second
    assert first == [
        "stage 0 on pipeline rank 0 failed in the weight backward of micro-batch 1: "
        "ArithmeticError: out of luck",
        "stage 1 on pipeline rank 1 failed in the input backward of micro-batch 1: "
        "ArithmeticError: out of luck",
    ]


def test_several_stages_on_a_rank_fail_alone(ranks):
    schedule = make_schedule("interleaved", 2, 4)

    def body():
        mine, executor = make_executor(schedule)
        seen = []
        for stage in range(4):
            for part in mine:
                part.faults = [(stage, 1, True, "out of luck")]
            seen.append(failure_of(lambda: executor.run(batches(4), objective=objective))[0])
        return seen

    first, second = ranks(2, body)
    assert first == second
    for stage, text in enumerate(first):
        assert re.match(rf"stage {stage} on pipeline rank {stage % 2} failed in the backward", text)


def test_failures_that_are_not_shared_are_raised_where_they_happen(ranks):
    def body():
        stages, executor = make_executor(make_schedule("1f1b", 2, 3), share_failures=False)
        stages[0].faults = ((1, 1, False, "boom"),)
        run = lambda: executor.run(batches(3), objective=objective)  # noqa: E731
        if dist.get_rank() == 1:
            assert "boom" in failure_of(run)[0]
        else:
            assert run() == []
        stages[0].faults = ()
        return len(run())  # and the pipeline goes on

    assert ranks(2, body) == [0, 3]


class Joined(Stage):
    """Meets a rank of another pipeline in each forward."""

    others = None

    def forward(self, x, batch):
        y = super().forward(x, batch)
        with torch.no_grad():
            dist.all_reduce(torch.zeros(1), group=self.others)
        return y


def test_stages_that_meet_other_pipelines_fail_at_once_and_leave_nobody_waiting(ranks):
    def body():
        rank = dist.get_rank()
        made = {pair: dist.new_group(pair) for pair in ((0, 1), (2, 3), (0, 2), (1, 3))}
        pipeline, others = (group for pair, group in made.items() if rank in pair)
        stage = Joined(rank % 2)
        stage.others = others
        if rank == 1:
            stage.faults = ((1, 1, False, "boom"),)
        schedule = make_schedule("1f1b", 2, 3)
        executor = Executor(schedule, stage, group=pipeline, activation=spec, stop_at_failure=True)
        executor.run(batches(3), objective=objective)

    with pytest.raises(RankFailure, match="boom") as caught:
        ranks(4, body, timeout=20)
    assert (caught.value.rank, caught.value.error_type) == (1, "StageError")


def test_what_fails_before_the_first_stage_is_named_on_all_ranks(ranks):
    def refuse(batch):
        if batch[0, 0] == 1:
            raise KeyError("no length")
        return spec(batch)

    def body():
        rank = dist.get_rank()
        _, executor = make_executor(make_schedule("1f1b", 2, 3))
        given = batches(3)
        texts = []

        def fails(run, *args, **options):
            text, where, cause = failure_of(lambda: run(*args, **options))
            assert cause != "NoneType" or f"rank {1 - rank}" in text or "another rank" in text
            texts.append((text, where))

        for at in (0, 1):
            executor._activation = refuse if rank == at else spec
            fails(executor.run, given, objective=objective)
            fails(executor.evaluate, given)
            executor._activation = (lambda batch: (2, 4)) if rank == at else spec
            fails(executor.evaluate, given)
            executor._activation = spec
            fails(executor.infer, given, output=refuse if rank == at else spec)
            fails(executor.run, given[rank == at :], objective=objective)
            fails(executor.run, given + given[: rank == at], objective=objective)
            fails(executor.evaluate, given[rank == at :])
            fails(executor.infer, given if rank == at else [], output=spec)
            assert len(executor.run(given, objective=objective)) == (3 if rank else 0)
        return texts

    first, second = ranks(2, body)
    assert first == second
    for at in (0, 1):
        where = f"stage {at} on pipeline rank {at} failed in the forward of micro-batch "
        other = where.replace(f" {at} ", f" {1 - at} ")
        few, most = "ValueError: got 2 micro-batches", "pass the same to all ranks"
        expected = [
            f"{where}1: activation() raised KeyError: 'no length'",
            f"{where}1: activation() raised KeyError: 'no length'",
            f"{where}0: TypeError: activation() must return a TensorSpec, got tuple",
            f"{where}1: output() raised KeyError: 'no length'",
            f"{where}2: {few}, but the schedule is for 3: pass that number, or make "
            "another schedule",
            f"{where}3: ValueError: got 4 micro-batches, but the schedule is for 3: pass that "
            "number, or make another schedule",
            f"{where}2: {few}, but another rank got 3: {most}",
            f"{other}0: ValueError: got 0 micro-batches, but another rank got 3: {most}",
        ]
        assert [text for text, _ in first[8 * at : 8 * at + 8]] == expected
    assert first[0][1] == (0, 1, Op.F, 0)


class Held:
    """Something that a graph keeps."""


class Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, times):
        ctx.held = Held()
        weakref.finalize(ctx.held, lambda: times.append(time.monotonic()))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def test_a_failed_rank_lets_go_of_its_graphs_before_the_others_are_through(ranks):
    def body():
        times, rank = [], dist.get_rank()
        weight = torch.ones(WIDTH, requires_grad=True)

        def stage(x, batch):
            if rank == 1:
                time.sleep(0.1)
                times.append(time.monotonic())
                return x * weight
            if batch[0, 0] == 3:
                raise MemoryError("no room")
            return Keep.apply(batch * weight, times)

        executor = Executor(
            make_schedule("gpipe", 2, 4), stage, group=dist.group.WORLD, activation=spec
        )
        failure_of(lambda: executor.run(batches(4), objective=objective))
        return times

    released, forwards = ranks(2, body)
    assert (len(released), len(forwards)) == (3, 4)
    assert max(released) < forwards[-1]


@pytest.mark.parametrize("batched", [False, True])
def test_no_room_for_what_arrives_names_the_message(ranks, batched):
    def body():
        executor = Executor(
            make_schedule("1f1b", 2, 2),
            lambda x, batch: x,
            group=dist.group.WORLD,
            activation=lambda batch: TensorSpec((1 << 50,), torch.float32),
            batch_p2p=batched,
            share_failures=False,
        )
        with pytest.raises((StageError, TransferError)) as caught:
            executor.run(batches(2), objective=objective)
        return str(caught.value)

    first, second = ranks(2, body)
    if not batched:  # receives are posted ahead
        assert "gradient of micro-batch 0: receiving it from pipeline rank 1 failed" in first
    where = "stage 1, activation of micro-batch 0: receiving it from pipeline rank 0 failed: "
    assert second.startswith(where)
    assert "allocate memory" in second


def test_a_stage_error_can_be_sent_between_processes():
    error = StageError(Action(Op.B, 2, 5), 1, "OSError: away")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert vars(again) == vars(error)


class InParts(Stage):
    """Two parts, of which the second may raise, in the forward or in the backward."""

    def parts(self, batch):
        return [torch.tanh if self.number else lambda x: batch, lambda x: self(x, batch)]


@pytest.mark.parametrize("backward", [False, True])
def test_a_failure_in_one_half_of_an_overlapped_pair_ends_the_other_half(ranks, backward):
    schedule = make_schedule("dualpipe-v", stages=2, microbatches=6)
    pairs = {a: pair for pair in schedule.pairs for a in pair}

    def make():
        mine = [InParts(stage) for stage in schedule.stages_of(dist.get_rank())]
        return mine, Executor(schedule, mine, group=dist.group.WORLD, activation=spec)

    def body():
        mine, executor = make()
        seen = []
        for stage in range(4):
            for microbatch in range(6):
                if Action(Op.B if backward else Op.F, stage, microbatch) in pairs:
                    for part in mine:
                        part.faults = [(stage, microbatch, backward, "out of luck")]
                    seen.append(failure_of(lambda: executor.run(batches(6), objective=objective)))
        for part in mine:
            part.faults = ()
            part.zero_grad()
        again, fresh = make()
        for each in (executor, fresh):
            each.run(batches(6), objective=objective)
        for part, other in zip(mine, again, strict=True):
            assert torch.equal(part.layer.weight.grad, other.layer.weight.grad)
        return [(text, where) for text, where, _ in seen]

    first, second = ranks(2, body)
    assert first == second
    assert first
    assert all(text.endswith("ArithmeticError: out of luck") for text, _ in first)
