"""1F1B against the closed forms of the papers, and what every schedule has."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_schedule import (
    Action,
    Costs,
    Op,
    check,
    forward_only,
    insert_communication,
    make_schedule,
    simulate,
    split_layers,
)

sizes = {"p": st.integers(1, 8), "m": st.integers(1, 32)}


def test_1f1b_order_of_the_papers_figure():
    assert str(make_schedule("1f1b", stages=4, microbatches=8)).splitlines()[1:] == [
        "rank 0: F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "rank 1: F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "rank 2: F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "rank 3: F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


def test_one_stage_is_gradient_accumulation():
    assert str(make_schedule("1f1b", stages=1, microbatches=3)).endswith("F0 B0 F1 B1 F2 B2")


def test_interleaved_order_is_megatrons(interleaved):
    schedule = make_schedule("interleaved", stages=2, microbatches=4, chunks=2, group=2)
    orders = [line.split(": ")[1] for line in str(schedule).splitlines()[1:]]
    assert orders == interleaved.strip().splitlines()


def test_interleaved_groups_visit_the_chunks_in_megatrons_order():
    schedule = make_schedule("interleaved", stages=2, microbatches=5, chunks=2, group=3)
    for rank, actions in enumerate(schedule.ranks):
        order = [(a.microbatch, a.stage // 2) for a in actions if a.op is Op.F]
        wanted = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)]
        assert order == wanted
        backwards = [(a.microbatch, a.stage // 2) for a in actions if a.op is Op.B]
        assert backwards == [(number, 1 - chunk) for number, chunk in wanted]
        assert {a.stage % 2 for a in actions} == {rank}


@settings(max_examples=60, deadline=None)
@given(**sizes, v=st.integers(1, 4), data=st.data())
def test_interleaved_warm_up_is_megatrons(p, m, v, data):
    valid = [n for n in range(p, m + 1) if m % n == 0 or m % n >= p]
    group = data.draw(st.sampled_from(valid)) if valid else None
    schedule = make_schedule("interleaved", p, m, chunks=v, group=group)
    for rank, actions in enumerate(schedule.ranks):
        ops = [action.op for action in actions]
        warmup = min(2 * (p - rank - 1) + (v - 1) * (group or m), m * v)
        assert ops.index(Op.B) == min(warmup + 1, m * v)
        assert schedule.peak_activations[rank] == min(warmup + 1, m * v)
        assert schedule.stages_of(rank) == [chunk * p + rank for chunk in range(v)]


def overlapped(schedule):
    """The orders without their head, where `F1&B0` is a pair."""
    return [line.split(": ")[1] for line in str(schedule).splitlines()[1:]]


def test_overlap_on_one_rank_is_one_microbatch_ahead():
    # Megatron-LM's combined 1F1B without a pipeline.
    assert overlapped(make_schedule("1f1b", 1, 4, overlap=True)) == ["F0 F1&B0 F2&B1 F3&B2 B3"]
    assert overlapped(make_schedule("1f1b", 1, 1, overlap=True)) == ["F0 B0"]


def test_overlapped_1f1b_is_far_enough_ahead_that_no_pair_waits():
    schedule = make_schedule("1f1b", 3, 6, overlap=True)
    assert overlapped(schedule) == [
        "F0 F1 F2 F3 F4 F5&B0 B1 B2 B3 B4 B5",
        "F0 F1 F2 F3&B0 F4&B1 F5&B2 B3 B4 B5",
        "F0 F1&B0 F2&B1 F3&B2 F4&B3 F5&B4 B5",
    ]
    assert schedule.peak_activations == (6, 4, 2)
    for rank in range(3):
        spans = [s for s in simulate(schedule).timeline[rank] if s.action.op is Op.B]
        assert {b.start - a.start for a, b in itertools.pairwise(spans)} <= {2.0, 3.0}


@settings(max_examples=60, deadline=None)
@given(**sizes, v=st.integers(1, 4), data=st.data())
def test_overlap_adds_one_to_interleaved_warm_up_and_peak(p, m, v, data):
    valid = [n for n in range(p, m + 1) if m % n == 0 or m % n >= p]
    group = data.draw(st.sampled_from(valid)) if valid else None
    schedule = make_schedule("interleaved", p, m, chunks=v, group=group, overlap=True)
    plain = make_schedule("interleaved", p, m, chunks=v, group=group)
    assert check(schedule) == check(insert_communication(schedule)) == []
    pairs = 0
    for rank, actions in enumerate(schedule.ranks):
        warmup = min(2 * (p - rank - 1) + (v - 1) * (group or m) + 1, m * v)
        ops = [action.op for action in actions]
        assert ops.index(Op.B) == min(warmup + 1, m * v)
        assert schedule.peak_activations[rank] == min(plain.peak_activations[rank] + 1, m * v)
        steady = list(zip(actions[warmup::2], actions[warmup + 1 :: 2], strict=False))
        steady = steady[: m * v - warmup]
        assert set(steady) <= schedule.pairs
        pairs += len(steady)
        orders = [
            [a for a in each if a.op is op]
            for each in (actions, plain.ranks[rank])
            for op in (Op.F, Op.B)
        ]
        assert orders[:2] == orders[2:]
    assert len(schedule.pairs) == pairs


def test_without_a_group_the_smallest_that_fits_is_taken():
    assert make_schedule("interleaved", 4, 8) == make_schedule("interleaved", 4, 8, group=4)
    assert make_schedule("interleaved", 4, 6) == make_schedule("interleaved", 4, 6, group=6)
    assert make_schedule("interleaved", 4, 33) == make_schedule("interleaved", 4, 33, group=7)
    few = make_schedule("interleaved", 4, 3)
    assert check(few) == []


def test_dualpipe_v_has_its_eight_phases():
    n, m = 4, 11
    schedule = make_schedule("dualpipe-v", n, m)
    for r, actions in enumerate(schedule.ranks):
        lengths = (
            *(2 * (n - r - 1), r + 1, n - r - 1, m - 2 * n + r + 1),
            *(n - r - 1, r + 1, n - r - 1, r + 1),
        )
        kinds = "".join(f"{a.op.value}{int(a.stage >= n)} " for a in actions)
        halves = ["B1 ", "B0 "] * lengths[5]
        halves[lengths[5] :] = [half.replace("B", "I") for half in halves[lengths[5] :]]
        # Whose W it is follows from the order of the I, so it is looked at without its chunk.
        wanted = [
            "F0 " * lengths[0],
            "F0 F1 " * lengths[1],
            "I1 W F1 " * lengths[2],
            "F0 B1 F1 B0 " * lengths[3],
            "B1 F1 B0 " * lengths[4],
            "".join(halves),
            "W I0 " * lengths[6],
            "W " * lengths[7],
        ]
        assert re.sub("W[01]", "W", kinds) == "".join(wanted)
    alone = {Action(Op.F, n - 1, n), Action(Op.B, n, 0)}
    assert not alone & {action for pair in schedule.pairs for action in pair}
    pairs = sum(m - 2 * n + r + 1 for r in range(n)) * 2 - 1 + sum(n - r - 1 for r in range(n))
    assert len(schedule.pairs) == pairs


def test_dualpipe_is_dualpipe_v_with_a_copy_of_the_model_for_each_half():
    dual = make_schedule("dualpipe", 6, 14)
    half = make_schedule("dualpipe-v", 3, 7)
    ops = [[action.op for action in actions] for actions in half.ranks]
    assert [[action.op for action in actions] for actions in dual.ranks] == ops + ops[::-1]
    assert dual.directions == 2
    assert dual.depth == 6
    assert [dual.replicas_of(stage) for stage in (0, 7)] == [[0, 6], [1, 7]]
    assert [dual.stage_ranks[stage] for stage in (0, 6)] == [0, 5]
    assert dual.microbatches_of(2) == range(7)
    assert dual.microbatches_of(8) == range(7, 14)
    assert dual.next_stage(5) is None
    assert dual.previous_stage(6) is None


def test_zero_bubble_orders_are_the_papers():
    assert str(make_schedule("zb-h1", 3, 4)).splitlines()[1:] == [
        "rank 0: F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "rank 1: F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "rank 2: F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]
    first = str(make_schedule("zb-h2", 3, 6)).splitlines()[1]
    assert first.startswith("rank 0: F0 F1 F2 F3 F4 I0 W0 F5 I1")  # 2p - 1 forwards first


@settings(max_examples=60, deadline=None)
@given(**sizes)
def test_1f1b_is_right_and_has_the_papers_costs(p, m):
    schedule = make_schedule("1f1b", stages=p, microbatches=m)
    assert check(schedule) == []
    assert check(insert_communication(schedule)) == []
    peaks = tuple(min(p - r, m) for r in range(p))
    assert schedule.peak_activations == peaks
    simulated = simulate(schedule)
    assert simulated.peak_activations == peaks
    assert simulated.makespan == (m + p - 1) * 3.0
    assert simulated.bubble == pytest.approx([(p - 1) / (m + p - 1)] * p)
    for rank, actions in enumerate(schedule.ranks):
        ops = [action.op for action in actions]
        warmup = ops.index(Op.B) - 1 if p - rank - 1 < m else ops.index(Op.B)
        assert warmup == min(p - rank - 1, m)


@settings(max_examples=30, deadline=None)
@given(**sizes, n=st.integers(1, 40))
def test_forward_only_takes_any_number_of_microbatches_in_order(p, m, n):
    schedule = forward_only(make_schedule("1f1b", stages=p, microbatches=m), n)
    for rank, actions in enumerate(schedule.ranks):
        forwards = [action for action in actions if action.op.is_compute]
        assert forwards == [Action(Op.F, rank, i) for i in range(n)]


def test_simulation_counts_latency_and_uneven_stages():
    schedule = make_schedule("1f1b", stages=2, microbatches=1)
    assert simulate(schedule, Costs(forward=[1, 3], backward=[2, 6], latency=0.5)).makespan == 13.0
    spans = simulate(schedule, Costs(latency=0.5)).timeline[1]
    assert [(span.action.op, span.start, span.end) for span in spans] == [
        (Op.F, 1.5, 2.5),
        (Op.B, 2.5, 4.5),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward": -1.0}, "forward is -1.0: expected numbers of 0 or more"),
        ({"backward": [1.0]}, "1 stages cannot be joined to 4"),
        ({"latency": -1.0}, "latency is -1.0"),
    ],
)
def test_simulation_refuses_bad_times(options, message):
    with pytest.raises(ValueError, match=message):
        simulate(make_schedule("1f1b"), Costs(**options))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("1f1b1",), {}, "unknown schedule '1f1b1'. Did you mean '1f1b'\\? Known: gpipe, 1f1b"),
        (("zzz",), {}, "unknown schedule 'zzz'. Known: gpipe, 1f1b"),
        (("1f1b", 0), {}, "stages is 0: expected a whole number of at least 1"),
        (("1f1b", 2, 2.5), {}, "microbatches is 2.5"),
        (("gpipe",), {"chunks": 2}, "schedule 'gpipe' has no option 'chunks'; its options: none"),
        (("1f1b",), {"chunks": 2}, "schedule '1f1b' has no option 'chunks'; its options: overlap"),
        (("zbv",), {}, "unknown schedule 'zbv'. Did you mean 'zb-v'\\?"),
        (("bfs",), {"group": 2}, "'bfs' has no option 'group'; its options: chunks"),
        (("bfs",), {"chunks": 0}, "chunks is 0: expected a whole number of at least 1"),
        (
            ("interleaved",),
            {"group": 2},
            "group is 2: .* from 4 to 8, .*the nearest valid group is 4",
        ),
        (("interleaved",), {"group": 6}, "group is 6: .*at least 4.*the nearest valid group is 4"),
        (("interleaved", 4, 3), {"group": 3}, "3 micro-batches on 4 ranks.*leave group out"),
        (("dualpipe", 3), {}, "stages is 3: .* must be even; use 4, or dualpipe-v"),
        (("dualpipe", 4, 9), {}, "microbatches is 9: .*an even number of at least 8; use 10"),
        (("dualpipe", 4, 6), {}, "microbatches is 6: .*use 8"),
        (("dualpipe-v", 4, 7), {}, "microbatches is 7: .*at least 8; use that many, or zb-v"),
    ],
)
def test_make_schedule_says_what_would_work(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(*arguments, **options)


@settings(max_examples=100, deadline=None)
@given(stages=st.integers(1, 12), extra=st.integers(0, 40))
def test_layers_are_split_evenly_and_never_more_onto_the_last_stage(stages, extra):
    split = split_layers(stages + extra, stages)
    assert [layer for part in split for layer in part] == list(range(stages + extra))
    lengths = [len(part) for part in split]
    assert max(lengths) - min(lengths) <= 1
    assert lengths[-1] == min(lengths)


def test_extra_layers_go_to_the_first_middle_stages():
    assert [len(part) for part in split_layers(10, 4)] == [2, 3, 3, 2]
    assert [len(part) for part in split_layers(11, 4)] == [3, 3, 3, 2]
    assert [len(part) for part in split_layers(5, 2)] == [3, 2]


def test_more_stages_than_layers_is_refused():
    with pytest.raises(ValueError, match=r"3 layers cannot fill 4 pipeline stages.*at most 3"):
        split_layers(3, 4)
    with pytest.raises(ValueError, match="stages is 0"):
        split_layers(3, 0)
