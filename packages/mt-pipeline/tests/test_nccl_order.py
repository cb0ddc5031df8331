"""Every schedule's messages, as the executor gives them to NCCL, replayed by NCCL's rules.

The ranks run one after the other in this process, each the executor itself on stages of one
product. What it asks of `torch.distributed` is recorded, and then replayed together.
"""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from mt_parallel_state import ParallelLayout, ParallelState
from mt_pipeline import Executor, TensorSpec
from mt_pipeline.transfer import Mailbox
from mt_schedule import Costs, insert_communication, make_schedule
from mt_testing import CommunicationError, recorded_ranks, replay
from test_executor_grid import SCHEDULES

SPEC = TensorSpec((2,), torch.float32)
# Receives are placed by these: as late as messages take, and where stages are uneven.
COSTS = (
    None,
    {"latency": 0.5},
    {"forward": 0.2, "backward": 3.0},
    {"forward": 3.0, "backward": 0.2},
)


def stage():
    weight = torch.ones(2, requires_grad=True)
    return lambda x, batch: (batch if x is None else x) * weight


def run_rank(schedule, rank, *, tied=False, evaluates=0):
    """One step of one rank, with what the trainer adds to it."""
    layout = ParallelLayout(pp=len(schedule.ranks))
    with ParallelState(layout, device="cpu") as state:
        group, held = state.group("pp"), schedule.stages_of(rank)
        executor = Executor(
            schedule,
            [stage() for _ in held],
            group=group,
            activation=lambda batch: SPEC,
            batch_p2p=True,
        )
        batches = [torch.ones(2) for _ in range(schedule.microbatches)]
        executor.run(batches, objective=lambda output, batch: output.sum())
        if tied:
            for name in ("embedding", "mirror"):
                if (pair := state.group(name)) is not None:
                    dist.all_reduce(torch.zeros(3), group=pair)
        if evaluates:
            executor.evaluate(batches[:1] * evaluates)
            executor.infer(batches[:evaluates], output=lambda batch: SPEC)


def schedules(worlds, microbatches):
    """Every schedule that takes these sizes."""
    for (name, options), ranks, number in itertools.product(SCHEDULES, worlds, microbatches):
        try:
            yield make_schedule(name, stages=ranks, microbatches=number, **options)
        except ValueError:
            continue  # it says what it takes; its own tests are about that


def placed(schedule, costs):
    """The schedule with its messages placed for costs of all stages alike."""
    if costs is None:
        return schedule
    each = {
        name: (value,) * schedule.depth if name in ("forward", "backward") else value
        for name, value in {"forward": 1.0, "backward": 2.0, **costs}.items()
    }
    return insert_communication(schedule, Costs(**each))


def check(schedule):
    world = len(schedule.ranks)
    ranks = recorded_ranks(world, lambda rank: run_rank(schedule, rank, tied=True))
    try:
        replay(ranks)
    except CommunicationError as error:
        raise AssertionError(f"{schedule.name} p={world} m={schedule.microbatches}") from error
    messages = [len(call.messages) for calls in ranks for call in calls]
    assert sum(messages) == sum(
        action.op.is_message and schedule.peer(action) is not None
        for _, _, action in insert_communication(schedule)
    )
    return ranks


def cases():
    chosen = random.Random(7)
    for _, group in itertools.groupby(
        schedules((2, 3, 4), (2, 3, 4, 6, 8)), key=lambda schedule: schedule.name
    ):
        group = list(group)
        yield from chosen.sample(group, min(len(group), 4))


def test_a_sample_of_all_schedules_ends():
    names = set()
    for number, schedule in enumerate(cases()):
        names.add(schedule.name)
        check(placed(schedule, COSTS[number % len(COSTS)]))
    assert names >= {"1f1b", "gpipe", "dualpipe"}


@pytest.mark.campaign
@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("world", [2, 3, 4, 6, 8])
def test_all_schedules_end(world, costs):
    for schedule in schedules((world,), (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)):
        check(placed(schedule, costs))


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "dualpipe-v"])
def test_messages_up_and_down_have_communicators_of_their_own(name):
    options = {"chunks": 2} if name == "interleaved" else {}
    schedule = make_schedule(name, stages=4, microbatches=8, **options)
    ways = {}
    for calls in check(schedule):
        for call in calls:
            for message in call.messages:
                ways.setdefault(call.lane, set()).add(message.source < message.destination)
    assert sorted(ways.values(), key=str) == [{False}, {True}]


@pytest.mark.parametrize("evaluates", [1, 4])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_evaluation_and_generation_after_a_step_end(name, evaluates):
    schedule = make_schedule(name, stages=4, microbatches=8)
    replay(recorded_ranks(4, lambda rank: run_rank(schedule, rank, evaluates=evaluates)))


def test_sending_first_one_by_one_is_found_to_hang(monkeypatch):
    """What the batches are for."""

    def singly(self, actions):
        for action in sorted(actions, key=lambda action: action.op.is_receive):
            start(self, [action])

    start = Mailbox._start_batch
    monkeypatch.setattr(Mailbox, "_start_batch", singly)
    monkeypatch.setattr(Mailbox, "_lane", lambda self, action: self._links.up)
    schedule = make_schedule("1f1b", stages=4, microbatches=8)
    with pytest.raises(CommunicationError, match="ranks wait forever"):
        replay(recorded_ranks(4, lambda rank: run_rank(schedule, rank)))


def test_a_rank_that_takes_its_messages_in_another_order_is_found_to_hang():
    schedule = make_schedule("gpipe", stages=2, microbatches=3)

    def run(rank):
        if rank == 0:
            run_rank(schedule, rank)
            return
        with pytest.MonkeyPatch.context() as patch:
            start = Mailbox._start_batch
            late = []

            def turned(self, actions):
                late.append(actions)
                if len(late) == 3:
                    for each in late[::-1]:
                        start(self, each)

            patch.setattr(Mailbox, "_start_batch", turned)
            patch.setattr(Mailbox, "take", lambda self, receive: torch.ones(2))
            run_rank(schedule, rank)

    with pytest.raises(CommunicationError, match="ranks wait forever"):
        replay(recorded_ranks(2, run))
