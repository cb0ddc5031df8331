"""Weight gradients that are marked DEFER wait for the end of their rank, everywhere alike."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from mt_pipeline import (
    Action,
    Executor,
    Mark,
    Op,
    Panel,
    Schedule,
    TensorSpec,
    check,
    defer_weights,
    draw_text,
    insert_communication,
    insert_hooks,
    make_schedule,
    simulate,
)
from torch import nn


def deferring(schedule: Schedule, ops=(Op.B, Op.W), numbers=range(99)) -> Schedule:
    """With the weight gradients of some micro-batches marked, and no promise of memory."""
    marks = frozenset(
        (Mark.DEFER, action)
        for _, _, action in schedule
        if action.op in ops and action.microbatch in numbers
    )
    assert marks
    return dataclasses.replace(schedule, marks=marks, peak_activations=None)


def orders(schedule: Schedule) -> list[str]:
    return [line.split(": ")[1] for line in str(schedule).splitlines()[1:]]


def test_a_backward_is_split_and_its_second_half_goes_to_the_end():
    schedule = deferring(make_schedule("1f1b", 2, 3), numbers=(0, 2))
    assert orders(defer_weights(schedule)) == ["F0 F1 I0 F2 B1 I2 W0 W2", "F0 I0 F1 B1 F2 I2 W0 W2"]
    assert orders(schedule) == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]


def test_a_weight_gradient_goes_to_the_end():
    schedule = deferring(make_schedule("zb-h1", 2, 3), numbers=(0,))
    assert orders(make_schedule("zb-h1", 2, 3))[0] == "F0 F1 I0 W0 F2 I1 W1 I2 W2"
    assert orders(defer_weights(schedule))[0] == "F0 F1 I0 F2 I1 W1 I2 W2 W0"


def test_gradients_are_reduced_after_what_was_put_off():
    schedule = insert_hooks(deferring(make_schedule("bfs", 1, 2)), gather=False)
    assert orders(schedule) == ["F0a F1a F0b F1b B0b B1b REDUCEb B0a B1a REDUCEa"]
    assert orders(defer_weights(schedule)) == [
        "F0a F1a F0b F1b I0b I1b W0b W1b REDUCEb I0a I1a W0a W1a REDUCEa"
    ]
    assert check(schedule) == []


def test_other_marks_and_overlapped_pairs_stay():
    schedule = deferring(make_schedule("1f1b", 1, 3, overlap=True), numbers=(1,))
    recompute = (Mark.RECOMPUTE, Action(Op.F, 0, 0))
    done = defer_weights(dataclasses.replace(schedule, marks=schedule.marks | {recompute}))
    assert orders(done) == ["F0 F1&B0 F2&I1 B2 W1"]
    assert done.marks == {recompute}
    assert defer_weights(done) is done


def test_times_and_peaks_show_it():
    schedule = deferring(make_schedule("1f1b", 3, 6))
    simulated = simulate(schedule)
    assert simulated.peak_activations == (6, 6, 6)
    assert simulated.makespan == 22.0 < simulate(make_schedule("1f1b", 3, 6)).makespan
    assert simulated == simulate(defer_weights(schedule))
    assert "F0-I0" in draw_text(Panel.of(schedule, simulated))


def test_check_looks_at_what_will_run():
    schedule = deferring(make_schedule("1f1b", 2, 3), numbers=(0,))
    assert check(schedule) == check(insert_communication(schedule)) == []
    promised = dataclasses.replace(schedule, peak_activations=(2, 1))
    # F0 F1 I0 F2 B1 B2 W0 and F0 I0 F1 B1 F2 B2 W0
    assert [str(v) for v in check(promised)] == [
        "rank 0, action 3: 3 live activations, but the schedule declares 2",
        "rank 1, action 2: 2 live activations, but the schedule declares 1",
    ]
    nothing = dataclasses.replace(schedule, marks=frozenset({(Mark.DEFER, Action(Op.W, 0, 0))}))
    assert [v.sentence for v in check(nothing)] == [
        "W0 of stage 0 is marked defer, but not in the schedule"
    ]


@pytest.mark.parametrize("communicates", [False, True])
def test_messages_go_as_they_would(communicates):
    schedule = make_schedule("zb-h1", 3, 5)
    if communicates:
        schedule = insert_communication(schedule)
    marked = deferring(schedule, numbers=(1, 3))
    full = insert_communication(marked)
    assert check(full) == []
    assert not full.marks
    computes = [tuple(a for a in actions if a.op.is_compute) for actions in full.ranks]
    assert (
        tuple(computes)
        == defer_weights(deferring(make_schedule("zb-h1", 3, 5), numbers=(1, 3))).ranks
    )


def test_runs_give_the_same_gradients(ranks):
    def body():
        results, rank = [], dist.get_rank()
        plain = make_schedule("1f1b", 2, 4)
        for schedule in (plain, deferring(plain), deferring(plain, numbers=(0, 2))):
            torch.manual_seed(rank)
            layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
            executor = Executor(
                schedule,
                lambda x, batch, layers=layers: layers(batch if x is None else x),
                group=dist.group.WORLD,
                activation=lambda batch: TensorSpec(tuple(batch.shape), batch.dtype),
            )
            torch.manual_seed(7)
            batches = [torch.randn(2, 3).double() for _ in range(4)]
            executor.run(batches, objective=lambda y, batch: (y * batch).sum(), record=True)
            ran = tuple(span.action for span in executor.timeline()[rank])
            assert ran == defer_weights(schedule).ranks[rank]
            results.append([p.grad for p in layers.parameters()])
        for expected, same_order, other_order in zip(*results, strict=True):
            assert torch.equal(same_order, expected)
            torch.testing.assert_close(other_order, expected, rtol=1e-12, atol=1e-12)

    ranks(2, body)
