"""The checker flags every error at its place, and nothing else."""

import dataclasses

import pytest
from mt_schedule import (
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


def test_a_backward_that_is_there_whole_and_in_halves_is_named():
    extra = Action(Op.I, 1, 2)
    violations = check(edited(BASE, 1, lambda actions: actions.append(extra)))
    assert [str(v) for v in violations] == [
        "rank 1, action 6: B2 of stage 1 does what I2 of stage 1, action 8, does too",
        "rank 1, action 9: W2 of stage 1 is missing on this rank",
    ]


def test_a_weight_gradient_before_its_input_gradient_is_named():
    schedule = make_schedule("zb-h1", stages=2, microbatches=2)
    place = schedule.ranks[0].index(Action(Op.W, 0, 0))

    def swap(actions):
        actions[place - 1], actions[place] = actions[place], actions[place - 1]

    violations = check(edited(schedule, 0, swap))
    assert [str(v) for v in violations] == [
        f"rank 0, action {place - 1}: W0 of stage 0 needs I0 of stage 0, which is action {place}"
    ]


def test_a_microbatch_of_the_other_direction_is_named():
    schedule = make_schedule("dualpipe", stages=2, microbatches=4)
    violations = check(edited(schedule, 0, lambda actions: actions.append(Action(Op.F, 0, 3))))
    assert [v.sentence for v in violations] == ["F3 of stage 0: micro-batches 0..1 pass that stage"]


def test_an_overlapped_pair_whose_second_depends_on_its_first_is_a_deadlock(parse):
    schedule = parse("F0 F1 B0 B1\nF0 B0 F1 B1", stages=2, microbatches=2)
    assert check(schedule) == []
    pair = (Action(Op.F, 1, 1), Action(Op.B, 1, 1))
    violations = check(dataclasses.replace(schedule, pairs=frozenset({pair})))
    assert violations
    assert all("deadlock" in v.sentence for v in violations)


def with_pairs(pairs, base=BASE) -> Schedule:
    return dataclasses.replace(base, pairs=frozenset(pairs))


def f(stage, number):
    return Action(Op.F, stage, number)


def b(stage, number):
    return Action(Op.B, stage, number)


APART = "rank {}, action {}: {} cannot overlap {}: it is on rank {}"
ABSENT = "rank {}, action 8: {} is in an overlapped pair, but not in the schedule"


@pytest.mark.parametrize(
    ("pairs", "wanted"),
    [  # rank 1: F0 F1 B0 F2 B1 F3 B2 B3
        ([(f(1, 1), b(1, 0)), (f(1, 2), b(1, 1))], []),
        ([(f(1, 9), b(1, 0))], [ABSENT.format(1, f(1, 9))]),
        ([(f(7, 0), b(7, 0))], [ABSENT.format(0, f(7, 0)), ABSENT.format(0, b(7, 0))]),
        ([(f(1, 1), b(1, 1))], []),  # parted: one after the other
        ([(f(0, 2), b(1, 0))], [APART.format(0, 2, f(0, 2), b(1, 0), 1)]),
        (
            [(f(1, 1), b(1, 0)), (f(1, 1), b(1, 1))],
            [
                "rank 1, action 1: F1 of stage 1 is in two overlapped pairs",
            ],
        ),
        (
            [(f(1, 1), b(1, 0)), (f(1, 2), b(1, 0))],
            [
                "rank 1, action 2: B0 of stage 1 is in two overlapped pairs",
            ],
        ),
    ],
)
def test_overlapped_pairs_that_cannot_be_are_named(pairs, wanted):
    assert [str(v) for v in check(with_pairs(pairs))] == wanted


def test_a_message_parts_an_overlapped_pair_which_then_runs_in_order(parse):
    text = """
    F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 RECV_B1 B1
    RECV_F0 F0 RECV_F1 F1 B0 SEND_B0 B1 SEND_B1
    """
    schedule = parse(text, stages=2, microbatches=2)
    for pair in ((f(1, 1), b(1, 0)), (f(0, 1), b(0, 0))):
        assert check(with_pairs([pair], base=schedule)) == []


def test_a_deadlock_is_found_beside_a_pair_that_cannot_be(parse):
    schedule = parse("F0 B0 F1 B1\nF0 F1 B0 B1", stages=2, microbatches=2)
    violations = check(with_pairs([(f(0, 0), b(1, 1))], base=schedule))
    assert ["deadlock" in v.sentence for v in violations] == [False, True, True]
