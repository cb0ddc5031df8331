"""What the simulator takes into account beside the order of actions."""

import dataclasses
import time

import pytest
from mt_schedule import (
    Action,
    Costs,
    Op,
    Schedule,
    insert_communication,
    make_schedule,
    simulate,
)


@pytest.mark.parametrize(
    ("stages", "microbatches", "seconds"),
    [(128, 256, 1), pytest.param(512, 2048, 10, marks=pytest.mark.campaign)],
)
def test_large_schedules_are_simulated_in_seconds(stages, microbatches, seconds):
    schedule = make_schedule("1f1b", stages, microbatches)
    start = time.process_time()
    simulated = simulate(schedule)
    took = time.process_time() - start
    assert simulated.makespan == 3 * (microbatches + stages - 1)
    assert max(simulated.peak_activations) == stages
    assert took < seconds


@pytest.mark.parametrize(
    "astray", [Action(Op.F, 7, 0), Action(Op.B, -1, 0), Action(Op.F, 0, 2), Action(Op.F, 1, -1)]
)
def test_an_action_of_no_stage_or_microbatch_points_to_check(astray):
    schedule = make_schedule("1f1b", 2, 2)
    ranks = (schedule.ranks[0], (*schedule.ranks[1], astray))
    broken = dataclasses.replace(schedule, ranks=ranks)
    for refuses in (simulate, insert_communication):
        with pytest.raises(ValueError, match=r"there is no such .*check\(schedule\)"):
            refuses(broken)


def test_an_overlapped_pair_starts_with_both_inputs_and_ends_as_one():
    schedule = make_schedule("dualpipe-v", 2, 4)
    simulated = simulate(schedule, costs=Costs(pair_share=0.5))
    spans = {span.action: (span.start, span.end) for one in simulated.timeline for span in one}
    for first, second in schedule.pairs:
        assert spans[first] == spans[second]
        assert spans[first][1] - spans[first][0] == pytest.approx(1.5)
    apart = dataclasses.replace(schedule, pairs=frozenset())
    assert simulate(apart).makespan <= simulate(schedule).makespan


def test_values_with_everything_survive_json():
    schedule = insert_communication(make_schedule("dualpipe", 2, 4))
    again = Schedule.from_json(schedule.to_json())
    assert again == schedule
    assert again.pairs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"directions": 3}, "stages is 4, not a multiple of the 3 directions"),
        (
            {"pairs": frozenset({(Action(Op.B, 0, 0), Action(Op.F, 0, 1))})},
            "B0 of stage 0 cannot overlap F1 of stage 0: it takes an F and a B or I",
        ),
    ],
)
def test_values_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(make_schedule("dualpipe", 2, 4), **change)
