"""The checker flags what is wrong, where it is wrong, and nothing else."""

import dataclasses
import itertools
from collections import defaultdict, deque

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mt_pipeline import (
    Action,
    Op,
    Schedule,
    Violation,
    check,
    insert_communication,
    make_schedule,
    simulate,
)


def edited(schedule: Schedule, rank: int, edit) -> Schedule:
    ranks = [list(actions) for actions in schedule.ranks]
    edit(ranks[rank])
    return dataclasses.replace(schedule, ranks=tuple(tuple(actions) for actions in ranks))


def places(violations: list[Violation]) -> set[tuple[int, int]]:
    return {(violation.rank, violation.index) for violation in violations}


BASE = make_schedule("1f1b", stages=3, microbatches=4)
# rank 1: F0 F1 B0 F2 B1 F3 B2 B3


def test_dropped_forward_is_named_where_it_is_needed():
    violations = check(edited(BASE, 1, lambda actions: actions.pop(3)))
    assert places(violations) == {(1, 5)}  # its backward, B2
    assert str(violations[0]) == "rank 1, action 5: F2 of stage 1 is missing on this rank"


def test_dropped_backward_is_named_at_the_end():
    violations = check(edited(BASE, 2, lambda actions: actions.pop(-1)))
    assert [str(v) for v in violations] == [
        "rank 2, action 7: B3 of stage 2 is missing on this rank"
    ]


def test_duplicate_is_named_at_its_second_place():
    violations = check(edited(BASE, 1, lambda actions: actions.insert(4, actions[3])))
    assert [str(v) for v in violations] == [
        "rank 1, action 4: F2 of stage 1 is already action 3 of this rank"
    ]


def test_backward_before_its_forward_is_named():
    def swap(actions):
        actions[2], actions[3] = actions[3], actions[2]

    violations = check(edited(BASE, 2, swap))  # rank 2: F0 B0 F1 B1 -> F0 B0 B1 F1
    assert Violation(2, 2, "B1 of stage 2 needs F1 of stage 2, which is action 3") in violations


def test_messages_in_another_order_than_they_are_sent_are_named_at_both_ends():
    full = insert_communication(BASE)

    def swap(actions):
        i, j = (actions.index(Action(Op.RECV_F, 1, number)) for number in (2, 3))
        actions[i], actions[j] = actions[j], actions[i]

    violations = check(edited(full, 1, swap))
    clash = (
        "messages out of order: rank 0 sends SEND_F2 of stage 0 where rank 1 expects "
        "RECV_F3 of stage 1"
    )
    at = [
        actions.index(a)
        for actions, a in [
            (full.ranks[0], Action(Op.SEND_F, 0, 2)),
            (full.ranks[1], Action(Op.RECV_F, 1, 2)),
        ]
    ]
    assert violations[:2] == [Violation(0, at[0], clash), Violation(1, at[1], clash)]


def test_a_rank_that_takes_microbatches_in_its_own_order_is_right():
    def swap(actions):  # rank 1: F1 F0 B0 F2 ...: nothing is lost, and nothing waits for ever
        actions[0], actions[1] = actions[1], actions[0]

    other = edited(BASE, 1, swap)
    assert check(other) == []
    assert check(insert_communication(other)) == []


def test_moved_forward_goes_over_the_declared_peak():
    violations = check(edited(BASE, 0, lambda actions: actions.insert(3, actions.pop(4))))
    # rank 0: F0 F1 F2 B0 F3 -> F0 F1 F2 F3 B0
    assert places(violations) == {(0, 3)}
    assert violations[0].sentence == "4 live activations, but the schedule declares 3"
    undeclared = dataclasses.replace(BASE, peak_activations=None)
    assert check(edited(undeclared, 0, lambda a: a.insert(3, a.pop(4)))) == []


@pytest.mark.parametrize(
    ("action", "sentence"),
    [
        (Action(Op.F, 7, 0), "F0 of stage 7: there are stages 0..2 only"),
        (Action(Op.F, -1, 0), "F0 of stage -1: there are stages 0..2 only"),
        (Action(Op.F, 1, 4), "F4 of stage 1: there are micro-batches 0..3 only"),
        (Action(Op.F, 2, 1), "F1 of stage 2: that stage is on rank 2"),
    ],
)
def test_action_that_cannot_be_there_is_named(action, sentence):
    violations = check(edited(BASE, 1, lambda actions: actions.insert(2, action)))
    assert [(v.rank, v.index, v.sentence) for v in violations] == [(1, 2, sentence)]


def test_communication_is_checked_where_it_is_given():
    full = insert_communication(BASE)
    # rank 1: RECV_F0 F0 RECV_F1 SEND_F0 F1 ...
    dropped = check(edited(full, 1, lambda actions: actions.pop(0)))
    assert Violation(1, 0, "RECV_F0 of stage 1 is missing on this rank") in dropped
    late = check(edited(full, 1, lambda actions: actions.insert(1, actions.pop(0))))
    assert Violation(1, 0, "F0 of stage 1 needs RECV_F0 of stage 1, which is action 1") in late
    early = check(edited(full, 1, lambda actions: actions.insert(1, actions.pop(3))))
    assert any(v.index == 1 and "SEND_F0 of stage 1 needs F0" in v.sentence for v in early)
    twice = check(edited(full, 1, lambda actions: actions.insert(4, actions[3])))
    assert Violation(1, 4, "SEND_F0 of stage 1 is already action 3 of this rank") in twice
    outward = Action(Op.SEND_B, 0, 0)
    nowhere = check(edited(full, 0, lambda actions: actions.append(outward)))
    assert "no other rank at that side" in nowhere[-1].sentence


def test_two_ranks_waiting_for_each_other_are_a_deadlock(parse):
    schedule = parse("F0 B0 F1 B1\nF0 F1 B0 B1", stages=2, microbatches=2)
    assert [str(v) for v in check(schedule)] == [
        "rank 0, action 1: deadlock: B0 of stage 0 waits for B0 of stage 1 on rank 1, "
        "which is stuck at F1 of stage 1",
        "rank 1, action 1: deadlock: F1 of stage 1 waits for F1 of stage 0 on rank 0, "
        "which is stuck at B0 of stage 0",
    ]
    for refuses in (simulate, insert_communication):
        with pytest.raises(ValueError, match="cannot complete"):
            refuses(schedule)


def test_sends_that_block_are_a_deadlock_until_buffers_hold_them(parse):
    text = """
    F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 RECV_B1 B1
    RECV_F0 F0 B0 SEND_B0 RECV_F1 F1 B1 SEND_B1
    """
    assert check(parse(text, stages=2, microbatches=2)) == []
    text = """
    F0 SEND_F0 F1 SEND_F1 F2 SEND_F2 F3 SEND_F3 RECV_B0 B0 RECV_B1 B1 RECV_B2 B2 RECV_B3 B3
    RECV_F0 F0 B0 SEND_B0 RECV_F1 F1 B1 SEND_B1 RECV_F2 F2 B2 SEND_B2 RECV_F3 F3 B3 SEND_B3
    """
    schedule = parse(text, stages=2, microbatches=4)
    assert [str(v) for v in check(schedule)] == [
        "rank 0, action 5: deadlock: SEND_F2 of stage 0 waits for rank 1, "
        "stuck at SEND_B0 of stage 1",
        "rank 1, action 3: deadlock: SEND_B0 of stage 1 waits for rank 0, "
        "stuck at SEND_F2 of stage 0",
    ]
    assert check(schedule, buffers=1) == []
    with pytest.raises(ValueError, match="buffers is -1"):
        check(schedule, buffers=-1)


def test_interleaved_golden_order_is_right(parse, interleaved):
    schedule = parse(interleaved, stages=4, microbatches=4, peak_activations=(5, 3))
    assert check(schedule) == []
    assert check(insert_communication(schedule)) == []
    assert places(check(dataclasses.replace(schedule, peak_activations=(4, 3)))) == {(0, 4)}


@pytest.mark.parametrize("line", ["F0a F0b F0c B0c B0b B0a", "F0a F0b F0c B0c B0a B0b"])
def test_order_between_stages_of_one_rank(parse, line):
    violations = check(parse(line, stages=3, microbatches=1))
    right = line.endswith("B0b B0a")
    assert [str(v) for v in violations] == (
        [] if right else ["rank 0, action 4: B0 of stage 0 needs B0 of stage 1, which is action 5"]
    )


@st.composite
def any_valid_schedule(draw) -> Schedule:
    """Stages placed anyhow, every rank in any order that can complete."""
    stages, ranks = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    microbatches = draw(st.integers(1, 4))
    placement = tuple(draw(st.integers(0, ranks - 1)) for _ in range(stages))
    # A micro-batch goes down and up the stages; which one moves on next is drawn.
    way = [(Op.F, s) for s in range(stages)] + [(Op.B, s) for s in reversed(range(stages))]
    turns = draw(st.permutations([i for i in range(microbatches) for _ in way]))
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    for turn, number in enumerate(turns):
        op, stage = way[turns[:turn].count(number)]
        lists[placement[stage]].append(Action(op, stage, number))
    return Schedule(
        name="drawn",
        stages=stages,
        microbatches=microbatches,
        ranks=tuple(tuple(actions) for actions in lists),
        stage_ranks=placement,
    )


@settings(max_examples=150, deadline=None)
@given(schedule=any_valid_schedule(), times=st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)))
def test_inserted_communication_never_deadlocks(schedule, times):
    assert check(schedule) == []
    full = insert_communication(schedule, forward=times[0], backward=times[1])
    assert check(full, buffers=0) == []
    assert not HandRun(full).goes_wrong()


class HandRun:
    """Runs a schedule by hand, with endless buffers: the checker's oracle.

    Members of an exchange happen at the same time, so its sends are taken first. Without
    communication, every result reaches the next stage at once.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.queues: dict[tuple[int, int], deque] = defaultdict(deque)
        self.arrived: set = set()
        self.done: set = set()

    def take(self, rank: int, action: Action) -> str:
        kind, key = action.op.value[-1], (action.stage, action.microbatch)
        if action.op.is_send:
            if (kind, *key) not in self.done:
                return "wrong"
            self.queues[rank, self.schedule.peer(action)].append((kind, action.microbatch))
            return "done"
        if action.op.is_receive:
            queue = self.queues[self.schedule.peer(action), rank]
            if not queue:
                return "waits"
            self.arrived.add((kind, *key))
            return "done" if queue.popleft() == (kind, action.microbatch) else "wrong"
        return self.compute(action, kind, key)

    def compute(self, action: Action, kind: str, key: tuple[int, int]) -> str:
        if (kind, *key) in self.done or (kind == "B" and ("F", *key) not in self.done):
            return "wrong"
        if action.stage != (0 if kind == "F" else self.schedule.stages - 1):
            neighbour = action.stage + (-1 if kind == "F" else 1)
            holder = self.schedule.stage_ranks
            travels = self.schedule.has_communication and holder[neighbour] != holder[action.stage]
            if travels and (kind, *key) not in self.arrived:
                return "wrong"
            if (kind, neighbour, action.microbatch) not in self.done:
                return "waits"
        self.done.add((kind, *key))
        return "done"

    def goes_wrong(self) -> bool:
        todo = [
            deque(
                action
                for _, run in itertools.groupby(actions, key=lambda a: a.op.is_compute)
                for action in sorted(run, key=lambda a: a.op.is_receive)
            )
            for actions in self.schedule.ranks
        ]
        moved = True
        while moved:
            moved = False
            for rank, actions in enumerate(todo):
                while actions and (result := self.take(rank, actions[0])) != "waits":
                    if result == "wrong":
                        return True
                    actions.popleft()
                    moved = True
        complete = len(self.done) == 2 * self.schedule.stages * self.schedule.microbatches
        return any(todo) or not complete or any(self.queues.values())


@settings(max_examples=200, deadline=None)
@given(data=st.data(), p=st.integers(1, 4), m=st.integers(1, 6), full=st.booleans())
def test_a_single_edit_is_flagged_exactly_when_it_breaks_the_run(data, p, m, full):
    schedule = make_schedule("1f1b", stages=p, microbatches=m)
    if full:
        schedule = insert_communication(schedule)
    rank = data.draw(st.integers(0, p - 1))
    position = st.integers(0, len(schedule.ranks[rank]) - 1)
    i, j = data.draw(position), data.draw(position)
    kind = data.draw(st.sampled_from(["drop", "swap", "duplicate", "move"]))

    def edit(actions):
        if kind == "drop":
            actions.pop(i)
        elif kind == "swap":
            actions[i], actions[j] = actions[j], actions[i]
        elif kind == "duplicate":
            actions.insert(j, actions[i])
        else:
            actions.insert(j, actions.pop(i))

    broken = edited(schedule, rank, edit)
    assume(broken.ranks[rank] != schedule.ranks[rank])
    violations = check(broken, buffers=m)
    over_peak = [v for v in violations if "live activations" in v.sentence]
    if HandRun(broken).goes_wrong():
        assert any(violation.rank == rank for violation in violations)
    else:
        assert violations == over_peak
