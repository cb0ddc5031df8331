"""Schedules as values: notation, JSON, validation."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_schedule import (
    SCHEDULES,
    Action,
    Costs,
    Op,
    Schedule,
    check,
    insert_communication,
    make_schedule,
)


def test_print_is_the_papers_notation():
    assert str(make_schedule("1f1b", stages=2, microbatches=3)) == (
        "1f1b: 2 stages, 3 micro-batches\nrank 0: F0 F1 B0 F2 B1 B2\nrank 1: F0 B0 F1 B1 F2 B2"
    )


def test_print_names_the_chunk_where_a_rank_holds_several_stages(parse, interleaved):
    printed = str(parse(interleaved, stages=4, microbatches=4)).splitlines()
    wanted = interleaved.strip().splitlines()
    assert printed[1:] == [f"rank {rank}: {line}" for rank, line in enumerate(wanted)]


def test_print_shows_a_stage_on_the_wrong_rank():
    schedule = Schedule(
        name="x", stages=2, microbatches=1, ranks=((Action(Op.F, 1, 0),), (Action(Op.B, 1, 0),))
    )
    assert "F0@1" in str(schedule)


def test_communication_surrounds_the_computation():
    schedule = insert_communication(make_schedule("1f1b", stages=3, microbatches=1))
    assert str(schedule).splitlines()[1:] == [
        "rank 0: F0 SEND_F0 RECV_B0 B0",
        "rank 1: RECV_F0 F0 SEND_F0 RECV_B0 B0 SEND_B0",
        "rank 2: RECV_F0 F0 B0 SEND_B0",
    ]
    assert insert_communication(schedule) is schedule


def test_receives_are_placed_when_their_message_is_made():
    schedule = insert_communication(make_schedule("1f1b", stages=2, microbatches=3))
    assert str(schedule).splitlines()[1:] == [
        "rank 0: F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 F2 SEND_F2 RECV_B1 B1 RECV_B2 B2",
        "rank 1: RECV_F0 F0 RECV_F1 B0 SEND_B0 F1 B1 RECV_F2 SEND_B1 F2 B2 SEND_B2",
    ]


@pytest.mark.parametrize(
    ("name", "costs"),
    [
        ("1f1b", Costs(forward=[0, 1, 1, 1])),
        ("1f1b", Costs(forward=0.0, backward=0.0)),
        ("1f1b", Costs(forward=[1.0, 1e-18, 1.0, 1e18])),
        ("zb-h1", Costs(weight=2.0)),  # so I takes no time
        ("zb-h1", Costs(weight=0.0, latency=1e20)),
        ("dualpipe-v", Costs(backward=0.0, pair_share=1e-30)),
    ],
)
def test_a_message_comes_after_its_computation_even_where_that_takes_no_time(name, costs):
    schedule = make_schedule(name, stages=4, microbatches=8)
    full = insert_communication(schedule, costs=costs)
    assert check(full) == []
    kept = [tuple(a for a in actions if not a.op.is_message) for actions in full.ranks]
    assert tuple(kept) == schedule.ranks


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(list(SCHEDULES)),
    times=st.lists(st.sampled_from([0.0, 0.0, 1e-30, 0.5, 1.0]), min_size=24, max_size=24),
    latency=st.sampled_from([0.0, 1.0, 1e9]),
)
def test_communication_is_right_for_any_times(name, times, latency):
    schedule = make_schedule(name, stages=4, microbatches=8)
    forward, inputs, weight = (times[i : i + schedule.depth] for i in (0, 8, 16))
    backward = [a + b for a, b in zip(inputs, weight, strict=True)]
    costs = Costs(forward=forward, backward=backward, weight=weight, latency=latency)
    assert check(insert_communication(schedule, costs=costs)) == []


def test_stages_on_one_rank_do_not_communicate(parse):
    line = "F0a F0b F0c B0c B0b B0a"
    assert not insert_communication(parse(line, stages=3, microbatches=1)).has_communication


def test_json_round_trip_keeps_the_value(parse, interleaved):
    for schedule in (
        make_schedule("1f1b", stages=3, microbatches=4),
        insert_communication(make_schedule("1f1b", stages=2, microbatches=2)),
        parse(interleaved, stages=4, microbatches=4, stage_ranks=(0, 1, 0, 1)),
    ):
        again = Schedule.from_json(schedule.to_json())
        assert again == schedule
        assert hash(again) == hash(schedule)


def test_json_layout_is_stable():
    assert json.loads(make_schedule("1f1b", stages=1, microbatches=1).to_json()) == {
        "format": "mt-schedule",
        "version": 1,
        "name": "1f1b",
        "stages": 1,
        "microbatches": 1,
        "directions": 1,
        "stage_ranks": [0],
        "peak_activations": [1],
        "pairs": [],
        "ranks": [[["F", 0, 0], ["B", 0, 0]]],
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "not a schedule"),
        ({"version": 3}, "version 3 is not supported"),
        ({"name": 3}, "name is 3: expected a string"),
        ({"stages": 0}, "stages is 0: expected a whole number of at least 1"),
        ({"microbatches": True}, "microbatches is True"),
        ({"ranks": {}}, "ranks is {}: expected a list"),
        ({"ranks": []}, "ranks is empty"),
        ({"ranks": [[["F", 0]]]}, r"ranks\[0\]\[0\] is \['F', 0\]: expected \[op, stage, micro"),
        ({"ranks": [[["X", 0, 0]]]}, "with op one of F, B, I, W, SEND_F"),
        ({"ranks": [[[["F"], 0, 0]]]}, "with op one of F, B, I, W, SEND_F"),
        ({"stage_ranks": [4]}, "stage_ranks names rank 4"),
        ({"stage_ranks": ["0"]}, r"stage_ranks\[0\] is '0'"),
        ({"stage_ranks": [0, 0]}, "stage_ranks has 2 entries for 1 stages"),
        ({"peak_activations": [1, 1]}, "peak_activations has 2 entries for 1 ranks"),
    ],
)
def test_bad_json_names_the_field(change, message):
    document = json.loads(make_schedule("1f1b", stages=1, microbatches=1).to_json())
    with pytest.raises(ValueError, match=message):
        Schedule.from_json(json.dumps(document | change))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", "null"])
def test_json_that_is_no_schedule_is_refused(text):
    with pytest.raises(ValueError, match=r"not a (JSON )?schedule"):
        Schedule.from_json(text)
