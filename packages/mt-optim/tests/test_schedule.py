import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_optim import LRSchedule

# Megatron-LM's OptimizerParamScheduler with max_lr 1e-3, min_lr 1e-4, warm-up 100, decay 1000.
BASE = {"max_lr": 1e-3, "min_lr": 1e-4, "warmup": 100, "decay": 1000}
KINDS = ["constant", "linear", "cosine", "inverse-sqrt", "wsd"]


def schedule(kind, **changes):
    fields = {**BASE, "kind": kind, **changes}
    if kind == "wsd":
        fields.setdefault("wsd_anneal", 200)
    return LRSchedule(**fields)


@pytest.mark.parametrize(
    ("kind", "n", "expected"),
    [
        ("linear", 550, 5.5e-4),
        ("cosine", 550, 5.5e-4),
        ("inverse-sqrt", 550, 4.26401e-4),
        ("linear", 775, 3.25e-4),
        ("cosine", 775, 2.31802e-4),
        ("inverse-sqrt", 775, 3.59211e-4),
        ("inverse-sqrt", 1000, 3.16228e-4),
        ("inverse-sqrt", 1001, 1e-4),
        ("constant", 5000, 1e-3),
    ],
)
def test_golden_values_of_megatron(kind, n, expected):
    assert schedule(kind).at(n) == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("linear", 5.5e-4),
        ("cosine", 5.5e-4),
        ("exponential", 4.72792e-4),
        ("minus-sqrt", 3.63604e-4),
    ],
)
def test_golden_values_of_wsd_half_way_through_the_anneal(shape, expected):
    assert schedule("wsd", wsd_shape=shape).at(900) == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_warm_up_is_linear_and_reaches_the_peak_inclusively(kind):
    assert schedule(kind).at(50) == pytest.approx(5e-4)
    assert schedule(kind).at(100) == pytest.approx(1e-3)
    assert schedule(kind, init_lr=2e-4).at(0) == pytest.approx(2e-4)
    assert schedule(kind, init_lr=2e-4).at(25) == pytest.approx(4e-4)


@pytest.mark.parametrize("shape", ["linear", "cosine", "exponential", "minus-sqrt"])
def test_wsd_is_flat_until_the_anneal_and_ends_at_min_lr(shape):
    wsd = schedule("wsd", wsd_shape=shape)
    assert wsd.at(101) == wsd.at(800) == 1e-3
    assert wsd.at(801) < 1e-3
    assert wsd.at(1000) == pytest.approx(1e-4)
    assert wsd.at(1001) == 1e-4


def test_without_warm_up_it_starts_at_the_peak():
    for kind in KINDS:
        assert schedule(kind, warmup=0).at(0) == pytest.approx(1e-3)


def test_a_warm_up_that_fills_the_run_needs_no_decay_phase():
    for kind in ("linear", "cosine"):
        full = schedule(kind, warmup=1000)
        assert full.at(1000) == pytest.approx(1e-3)
        assert full.at(1001) == 1e-4


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    shape=st.sampled_from(["linear", "cosine", "exponential", "minus-sqrt"]),
    warmup=st.integers(0, 50),
    length=st.integers(1, 200),
    anneal=st.floats(0, 1),
    floor=st.floats(0, 1),
    start=st.floats(0, 1),
    points=st.lists(st.floats(0, 400), min_size=2, max_size=20),
)
def test_it_rises_then_falls_within_its_bounds(
    kind, shape, warmup, length, anneal, floor, start, points
):
    lr = LRSchedule(
        kind=kind,
        max_lr=0.01,
        min_lr=0.01 * floor,
        init_lr=0.01 * start,
        warmup=warmup,
        decay=warmup + length,
        wsd_anneal=round(anneal * length),
        wsd_shape=shape,
    )
    points.sort()
    rising = [lr.at(n) for n in points if n <= warmup]
    falling = [lr.at(n) for n in points if n > warmup]
    tiny = 1e-15
    assert all(a <= b + tiny for a, b in itertools.pairwise(rising))
    assert all(a >= b - tiny for a, b in itertools.pairwise(falling))
    assert all(lr.min_lr - tiny <= value <= lr.max_lr + tiny for value in falling)
    assert all(lr.init_lr - tiny <= value <= lr.max_lr + tiny for value in rising)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "cos"}, "one of constant, linear, cosine, inverse-sqrt, wsd; got 'cos'"),
        (
            {"kind": "wsd", "wsd_shape": "sqrt"},
            "linear, cosine, exponential, minus-sqrt; got 'sqrt'",
        ),
        ({"max_lr": 0.0}, "max_lr must be positive"),
        ({"max_lr": math.inf}, "max_lr must be positive and at most"),
        ({"min_lr": 2e-3}, r"min_lr must be in \[0, max_lr=0.001\], got 0.002"),
        ({"init_lr": -1.0}, "init_lr must be in"),
        ({"warmup": -1}, "warmup must be 0 or more, got -1"),
        ({"decay": None}, "'cosine' needs decay"),
        ({"decay": 99}, "at least warmup=100"),
        ({"kind": "wsd"}, "wsd_anneal between 0 and decay - warmup = 900, got None"),
        ({"kind": "wsd", "wsd_anneal": 901}, "got 901"),
    ],
)
def test_a_bad_field_is_named_with_what_is_allowed(fields, message):
    with pytest.raises(ValueError, match=message):
        LRSchedule(**{**BASE, "kind": "cosine", **fields})


def test_a_negative_position_is_refused_and_fields_are_frozen():
    with pytest.raises(ValueError, match="n must be 0 or more, got -1"):
        schedule("linear").at(-1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule("linear").max_lr = 1.0
