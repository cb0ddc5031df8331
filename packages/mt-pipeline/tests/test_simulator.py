"""What the simulator takes into account beside the order of actions."""

import dataclasses
import time

import pytest
from mt_pipeline import (
    Action,
    Costs,
    Mark,
    Op,
    Schedule,
    insert_communication,
    insert_hooks,
    make_schedule,
    simulate,
)


def test_512_stages_and_2048_microbatches_take_seconds():
    schedule = make_schedule("1f1b", 512, 2048)
    start = time.process_time()
    simulated = simulate(schedule)
    took = time.process_time() - start
    assert simulated.makespan == 3 * (2048 + 511)
    assert max(simulated.peak_activations) == 512
    assert took < 10


def test_recompute_runs_the_forward_again_and_keeps_the_input_only():
    schedule = make_schedule("1f1b", 2, 2)
    marks = frozenset({(Mark.RECOMPUTE, Action(Op.F, 1, number)) for number in range(2)})
    marked = dataclasses.replace(schedule, marks=marks)
    costs = Costs(activation_bytes=10.0, message_bytes=1.0)
    plain, again = simulate(schedule, costs=costs), simulate(marked, costs=costs)
    assert (plain.makespan, again.makespan) == (9.0, 11.0)
    assert (plain.peak_bytes, again.peak_bytes) == ((20.0, 10.0), (20.0, 1.0))
    assert plain.peak_activations == again.peak_activations


def test_what_is_offloaded_takes_no_memory():
    schedule = make_schedule("gpipe", 1, 3)
    marks = frozenset({(Mark.OFFLOAD, Action(Op.F, 0, 1))})
    offloaded = dataclasses.replace(schedule, marks=marks)
    assert simulate(offloaded, costs=Costs(activation_bytes=4.0)).peak_bytes == (8.0,)


def test_what_is_recomputed_and_offloaded_counts_as_recomputed():
    schedule = make_schedule("gpipe", 2, 16)
    costs = Costs(activation_bytes=10.0, message_bytes=1.0)
    # The order of a set depends on what is in it: with many, each order is there.
    forwards = [Action(Op.F, 1, number) for number in range(16)]
    marks = frozenset((mark, f) for mark in (Mark.OFFLOAD, Mark.RECOMPUTE) for f in forwards)
    simulated = simulate(dataclasses.replace(schedule, marks=marks), costs=costs)
    assert simulated.peak_bytes == (160.0, 16.0)


def test_measured_times_of_single_actions_come_first():
    schedule = make_schedule("1f1b", 2, 2)
    slow = {Action(Op.F, 1, 1): 6.0}
    assert simulate(schedule, measured=slow).makespan == 9.0 + 5.0


@pytest.mark.parametrize(
    "astray", [Action(Op.F, 7, 0), Action(Op.B, -1, 0), Action(Op.F, 0, 2), Action(Op.F, 1, -1)]
)
def test_an_action_of_no_stage_or_microbatch_points_to_check(astray):
    schedule = make_schedule("1f1b", 2, 2)
    ranks = (schedule.ranks[0], (*schedule.ranks[1], astray))
    broken = dataclasses.replace(schedule, ranks=ranks)
    for refuses in (simulate, insert_communication):
        with pytest.raises(ValueError, match=r"there is no such .*check\(schedule\) says"):
            refuses(broken)


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        ({Action(Op.F, 0, 0): -5.0}, "F0 of stage 0 is measured at -5.0: expected a time of 0"),
        ({Action(Op.F, 0, 0): float("nan")}, "is measured at nan"),
        ({Action(Op.F, 0, 0): float("inf")}, "is measured at inf"),
        ({Action(Op.F, 0, 2): 1.0}, "F2 of stage 0 is measured, but not in schedule '1f1b'"),
        ({Action(Op.W, 0, 0): 1.0}, "W0 of stage 0 is measured, but not in schedule '1f1b'"),
    ],
)
def test_measured_times_that_cannot_be_are_refused(measured, message):
    with pytest.raises(ValueError, match=message):
        simulate(make_schedule("1f1b", 2, 2), measured=measured)


def test_an_overlapped_pair_starts_with_both_inputs_and_ends_as_one():
    schedule = make_schedule("dualpipe-v", 2, 4)
    simulated = simulate(schedule, costs=Costs(overlap=0.5))
    spans = {span.action: (span.start, span.end) for one in simulated.timeline for span in one}
    for first, second in schedule.overlaps:
        assert spans[first] == spans[second]
        assert spans[first][1] - spans[first][0] == pytest.approx(1.5)
    apart = dataclasses.replace(schedule, overlaps=frozenset())
    assert simulate(apart).makespan <= simulate(schedule).makespan


def test_hooks_take_no_time_and_stand_at_the_ends():
    schedule = make_schedule("interleaved", 2, 4)
    hooked = insert_hooks(schedule)
    assert simulate(hooked) == simulate(schedule)
    lines = str(hooked).splitlines()
    # One action ahead of what needs it.
    assert lines[1].startswith("rank 0: GATHERa F0a GATHERb F1a F0b")
    assert lines[1].endswith("B2b B3b REDUCEb B2a B3a REDUCEa")
    full = insert_communication(hooked)
    kept = [[a for a in actions if not a.op.is_message] for actions in full.ranks]
    assert kept == [list(actions) for actions in hooked.ranks]
    with pytest.raises(ValueError, match="has hooks already"):
        insert_hooks(hooked)


def test_values_with_everything_survive_json():
    schedule = insert_communication(insert_hooks(make_schedule("dualpipe", 2, 4)))
    f, w = (next(a for _, _, a in schedule if a.op is op) for op in (Op.F, Op.W))
    marks = frozenset({(Mark.OFFLOAD, f), (Mark.DEFER, w)})
    schedule = dataclasses.replace(schedule, marks=marks)
    again = Schedule.from_json(schedule.to_json())
    assert again == schedule
    assert again.overlaps
    first = schedule.to_json().replace('"version": 2', '"version": 1')
    assert Schedule.from_json(first) == schedule


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"directions": 3}, "stages is 4, which 3 directions do not share evenly"),
        (
            {"overlaps": frozenset({(Action(Op.B, 0, 0), Action(Op.F, 0, 1))})},
            "B0 of stage 0 cannot overlap F1 of stage 0: it takes an F and a B or I",
        ),
        (
            {"marks": frozenset({(Mark.DEFER, Action(Op.F, 0, 0))})},
            "F0 of stage 0 cannot be marked defer: only a B or a W can",
        ),
        (
            {"marks": frozenset({(Mark.OFFLOAD, Action(Op.B, 0, 0))})},
            "B0 of stage 0 cannot be marked offload: only an F can",
        ),
    ],
)
def test_values_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(make_schedule("dualpipe", 2, 4), **change)
