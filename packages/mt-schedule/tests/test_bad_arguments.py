"""What cannot be a schedule is refused at once, whatever is given in the place of an argument."""

import inspect
import time

import mt_schedule
import pytest
from mt_schedule import (
    Action,
    Costs,
    Op,
    Panel,
    Schedule,
    balance_layers,
    check,
    defer_weights,
    draw_svg,
    draw_text,
    forward_only,
    insert_communication,
    make_schedule,
    parse_layout,
    place_stages,
    simulate,
    split_layers,
    steps,
)

SCHEDULE = make_schedule("1f1b", 2, 4)
RANKS = SCHEDULE.ranks
PANEL = Panel.of(SCHEDULE, simulate(SCHEDULE))
# For each function arguments that it takes, all by name.
GOOD = {
    Schedule: {"name": "x", "stages": 2, "microbatches": 4, "ranks": RANKS, "stage_ranks": (0, 1)},
    Schedule.from_json: {"text": SCHEDULE.to_json()},
    make_schedule: {"name": "interleaved", "stages": 2, "microbatches": 4, "chunks": 2, "group": 2},
    check: {"schedule": SCHEDULE, "buffers": 0},
    simulate: {"schedule": SCHEDULE, "costs": Costs()},
    insert_communication: {"schedule": SCHEDULE, "costs": Costs()},
    defer_weights: {"schedule": SCHEDULE, "actions": [Action(Op.B, 0, 0)]},
    forward_only: {"schedule": SCHEDULE, "microbatches": 3},
    steps: {"actions": RANKS[0]},
    Costs: {"forward": [1.0, 2.0], "weight": 1.0, "latency": 0.0, "bandwidth": 1.0},
    Costs().merged: {"stages": 2},
    Panel: {"schedule": SCHEDULE, "timeline": PANEL.timeline, "title": "x"},
    Panel.of: {"schedule": SCHEDULE, "simulation": simulate(SCHEDULE)},
    draw_text: {"panel": PANEL, "width": 80},
    split_layers: {"num_layers": 8, "stages": 4, "first": 1, "last": 1},
    balance_layers: {"costs": [1.0] * 4, "stages": 2, "embedding": 0.0, "loss": 1.0},
    place_stages: {"ranks": 2, "chunks": 2},
    parse_layout: {"text": "Et|tL", "num_layers": 2, "stages": 2},
}
BAD = [None, -1, 0, 1.5, float("nan"), 10**12, 10**30, "x", b"x", [], [None], {}, (1, 2), object()]
ROWS = [(function, name) for function, good in GOOD.items() for name in good]


@pytest.mark.parametrize(("function", "name"), ROWS, ids=lambda x: getattr(x, "__name__", x))
def test_a_bad_argument_is_a_value_or_type_error_at_once(function, name):
    function(**GOOD[function])
    for bad in BAD:
        began, message = time.process_time(), ""
        try:
            function(**{**GOOD[function], name: bad})
        except (ValueError, TypeError) as error:
            message = str(error)
        assert len(message) < 2000
        assert time.process_time() - began < 2, bad


def test_every_public_function_is_tried():
    public = [getattr(mt_schedule, name) for name in mt_schedule.__all__]
    assert {each for each in public if inspect.isfunction(each)} <= {*GOOD, draw_svg}
    with pytest.raises(TypeError, match="Panel"):
        draw_svg(None)
    with pytest.raises(ValueError, match="width is 1,000,000"):
        draw_svg(PANEL, width=10**6)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("gpipe", {"microbatches": 10**12}),
        ("1f1b", {"stages": 10**12}),
        ("zb-v", {"stages": 2**11, "microbatches": 2**11}),
        ("bfs", {"chunks": 999_999_999}),
        ("interleaved", {"microbatches": 10**9, "group": 10**9}),
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_made(name, arguments):
    began = time.process_time()
    with pytest.raises(ValueError, match="at most 2,097,152"):
        make_schedule(name, **arguments)
    assert time.process_time() - began < 0.2
