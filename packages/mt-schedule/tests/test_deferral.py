"""Deferred weight gradients wait for the end of their rank."""

import dataclasses

import pytest
from mt_schedule import (
    Action,
    Op,
    Panel,
    Schedule,
    check,
    defer_weights,
    draw_text,
    insert_communication,
    make_schedule,
    simulate,
)


def some(schedule: Schedule, numbers) -> set[Action]:
    """The B and W of some micro-batches."""
    return {a for _, _, a in schedule if a.op in (Op.B, Op.W) and a.microbatch in numbers}


def orders(schedule: Schedule) -> list[str]:
    return [line.split(": ")[1] for line in str(schedule).splitlines()[1:]]


def test_a_backward_is_split_and_its_second_half_goes_to_the_end():
    schedule = make_schedule("1f1b", 2, 3)
    deferred = defer_weights(schedule, some(schedule, (0, 2)))
    assert orders(deferred) == ["F0 F1 I0 F2 B1 I2 W0 W2", "F0 I0 F1 B1 F2 I2 W0 W2"]
    assert orders(schedule) == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]


def test_a_weight_gradient_goes_to_the_end():
    schedule = make_schedule("zb-h1", 2, 3)
    assert orders(schedule)[0] == "F0 F1 I0 W0 F2 I1 W1 I2 W2"
    assert orders(defer_weights(schedule, some(schedule, (0,))))[0] == "F0 F1 I0 F2 I1 W1 I2 W2 W0"


def test_overlapped_pairs_stay():
    schedule = make_schedule("1f1b", 1, 3, overlap=True)
    deferred = defer_weights(schedule, some(schedule, (1,)))
    assert orders(deferred) == ["F0 F1&B0 F2&I1 B2 W1"]
    assert check(deferred) == []


def test_times_and_peaks_show_it():
    deferred = defer_weights(make_schedule("1f1b", 3, 6))
    simulated = simulate(deferred)
    assert simulated.peak_activations == (6, 6, 6)
    assert simulated.makespan == 22.0 < simulate(make_schedule("1f1b", 3, 6)).makespan
    assert "F0-I0" in draw_text(Panel.of(deferred, simulated))


def test_no_peak_is_promised_that_could_not_be_kept():
    schedule = make_schedule("1f1b", 2, 3)
    deferred = defer_weights(schedule, some(schedule, (0,)))
    assert check(deferred) == []
    promised = dataclasses.replace(deferred, peak_activations=schedule.peak_activations)
    # F0 F1 I0 F2 B1 B2 W0 and F0 I0 F1 B1 F2 B2 W0
    assert [str(v) for v in check(promised)] == [
        "rank 0, action 3: 3 live activations, but the schedule declares 2",
        "rank 1, action 2: 2 live activations, but the schedule declares 1",
    ]


def test_what_is_not_there_cannot_be_put_off():
    for action in (Action(Op.W, 0, 0), Action(Op.F, 0, 0), Action(Op.B, 0, 9)):
        with pytest.raises(ValueError, match=f"{action} cannot be deferred"):
            defer_weights(make_schedule("1f1b", 2, 3), [action])


@pytest.mark.parametrize("communicates", [False, True])
def test_messages_go_as_they_would(communicates):
    plain = make_schedule("zb-h1", 3, 5)
    late = some(plain, (1, 3))
    full = insert_communication(
        defer_weights(insert_communication(plain) if communicates else plain, late)
    )
    assert check(full) == []
    computes = [tuple(a for a in actions if a.op.is_compute) for actions in full.ranks]
    assert tuple(computes) == defer_weights(plain, late).ranks
