"""Which layers and stages live where."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_schedule import (
    LayoutError,
    StageContent,
    balance_layers,
    make_schedule,
    parse_layout,
    place_stages,
    split_layers,
)


def lengths(parts):
    return [len(part) for part in parts]


def test_two_chunks_of_two_ranks_have_megatrons_layers():
    split, holder = split_layers(8, 4), place_stages(2, 2)
    held = [[layer for s in range(4) if holder[s] == r for layer in split[s]] for r in range(2)]
    assert held == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_the_v_turns_around_at_the_last_rank():
    assert place_stages(3, 2, v_shape=True) == (0, 1, 2, 2, 1, 0)
    assert place_stages(2, 3, v_shape=True) == (0, 1, 1, 0, 0, 1)
    assert make_schedule("zb-v", 4, 8).stage_ranks == tuple(min(s, 7 - s) for s in range(8))


def test_ends_have_fewer_layers_where_their_other_work_counts():
    assert lengths(split_layers(10, 4, count_embedding=True, count_loss=True)) == [2, 3, 3, 2]
    assert lengths(split_layers(7, 2, count_loss=True)) == [4, 3]
    assert lengths(split_layers(10, 3, first=2, last=2)) == [2, 6, 2]
    assert lengths(split_layers(11, 4, last=2)) == [3, 3, 3, 2]
    assert lengths(split_layers(5, 2, first=1, last=4)) == [1, 4]


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((4, 4), {"count_loss": True}, "a stage would have none"),
        ((9, 3), {"first": 0}, "first is 0: expected at least 1 layer"),
        ((9, 3), {"last": 2, "count_loss": True}, "last is 2 and its other work is counted too"),
        ((5, 2), {"first": 1, "last": 3}, "first=1, last=3: 0 other stages would share 1 layers"),
        ((4, 3), {"first": 2, "last": 2}, "1 other stages would share 0 layers"),
    ],
)
def test_places_that_do_not_fit_are_refused(sizes, options, message):
    with pytest.raises(ValueError, match=message):
        split_layers(*sizes, **options)


@settings(max_examples=60, deadline=None)
@given(
    costs=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    stages=st.integers(1, 5),
    ends=st.tuples(st.integers(0, 12), st.integers(0, 12)),
)
def test_balanced_layers_have_the_cheapest_dearest_stage(costs, stages, ends):
    if stages > len(costs):
        with pytest.raises(ValueError, match="every stage needs a layer"):
            balance_layers(costs, stages)
        return
    embedding, loss = ends

    def dearest(parts) -> float:
        sums = [sum(costs[layer] for layer in part) for part in parts]
        return max(
            total + embedding * (i == 0) + loss * (i == len(sums) - 1)
            for i, total in enumerate(sums)
        )

    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    every = [[range(a, b) for a, b in itertools.pairwise((0, *cut, len(costs)))] for cut in cuts]
    parts = balance_layers(costs, stages, embedding=embedding, loss=loss)
    assert parts in every
    assert dearest(parts) == min(map(dearest, every))


@pytest.mark.parametrize("cost", [1.0, 0.1, 1 / 3, 1e-300, 1e300])
@pytest.mark.parametrize(("layers", "stages"), [(10, 4), (23, 6), (100, 8)])
def test_layers_of_any_equal_cost_are_balanced_alike(cost, layers, stages):
    wanted = balance_layers([1] * layers, stages)
    assert balance_layers([cost] * layers, stages) == wanted
    assert len(wanted[-1]) == layers - (stages - 1) * -(-layers // stages)


def test_layers_and_ends_of_fractions_are_balanced_by_their_exact_sums():
    assert lengths(balance_layers([0.1] * 10, 4)) == [3, 3, 3, 1]
    assert lengths(balance_layers([0.1] * 10, 4, loss=0.2)) == [3, 3, 3, 1]
    assert lengths(balance_layers([0.1] * 10, 4, embedding=0.2)) == [1, 3, 3, 3]


def test_balance_refuses_what_is_no_cost():
    with pytest.raises(ValueError, match="numbers of 0 or more"):
        balance_layers([1.0, -1.0], 1)
    with pytest.raises(ValueError, match="numbers of 0 or more"):
        balance_layers([1.0, 2.0], 1, loss=float("inf"))


def test_megatrons_layout_of_a_61_layer_model_is_read():
    stages = parse_layout("Et*3|(tt|)*29,m|L", num_layers=61, stages=32)
    assert stages[0] == StageContent(layers=range(3), embedding=True)
    assert stages[1] == StageContent(layers=range(3, 5))
    assert stages[29] == StageContent(layers=range(59, 61))
    assert stages[30] == StageContent(layers=range(61, 61), mtp=1)
    assert stages[31] == StageContent(layers=range(61, 61), loss=True)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("EtL", [1]),
        (" E t , t | tL ", [2, 1]),
        ("E|t*2|(t|)*2((tt)*2|)*1L", [0, 2, 1, 1, 4, 0]),
        ("Et|tmmL", [1, 1]),
    ],
)
def test_layouts_are_read(text, wanted):
    stages = parse_layout(text, num_layers=sum(wanted))
    assert lengths(stage.layers for stage in stages) == wanted
    assert [stage.embedding for stage in stages] == [True] + [False] * (len(wanted) - 1)
    assert [stage.loss for stage in stages] == [False] * (len(wanted) - 1) + [True]


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        ("", 0, "the layout is empty"),
        ("Et|xL", 3, "'x' is unknown: use E, t, m, L"),
        ("t|tL", 0, "the first stage begins with the embedding"),
        ("Et|t", 3, "the last stage ends with the head and loss"),
        ("EtL|", 3, "the last stage ends with"),
        ("EtE|tL", 2, "E may occur only once"),
        ("EtL|tL", 2, "L may occur only once"),
        ("Et||tL", 3, "stage 1 is empty"),
        ("Et|(t|tL", 3, r"'\(' is never closed"),
        ("Et|t)L", 4, r"'\)' closes no '\('"),
        ("*3EtL", 0, "nothing before '\\*'"),
        ("Et*|tL", 3, "'\\*' needs a whole number"),
        ("Et*0|tL", 3, "'\\*' needs a whole number"),
        ("Et*-1|tL", 3, "'\\*' needs a whole number"),
        ("Em|tL", 3, "cannot come after a prediction layer"),
        ("Et*99999999999999999999L", 3, "more than 65536 symbols"),
        ("E((t*1000)*1000)*1000L", 11, "more than 65536 symbols"),
        ("E" + "(" * 5000, 4096, "the layout has 5001 characters"),
        ("E" + "(" * 500, 17, "nested more than 16 deep"),
        ("E__import__('os')L", 1, "'_' is unknown"),
    ],
)
def test_a_mistake_in_a_layout_is_pointed_at(text, position, reason):
    with pytest.raises(LayoutError, match=reason) as caught:
        parse_layout(text)
    assert caught.value.position == position
    line, caret = str(caught.value).splitlines()[-2:]
    if position < len(text) and len(text) < 100:
        assert line[caret.index("^")] == text[position]


def test_a_layout_error_survives_pickling():
    # As between the processes of a data loader, a launcher or a test run.
    with pytest.raises(LayoutError) as caught:
        parse_layout("Et|tx|tL")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.position) == (LayoutError, str(caught.value), 4)
    copied = copy.copy(caught.value)
    assert (str(copied), copied.position) == (str(caught.value), 4)


def test_another_number_of_layers_or_stages_is_named():
    with pytest.raises(LayoutError, match=r"it has 3 layers \(t\), the model 4"):
        parse_layout("Et|ttL", num_layers=4)
    with pytest.raises(LayoutError, match=r"it has 2 stages, but needs 4: write 3 '\|'"):
        parse_layout("Et|ttL", stages=4)


def test_the_caret_stands_below_the_character():
    with pytest.raises(LayoutError) as caught:
        parse_layout("Et|tx|tL")
    assert str(caught.value) == (
        "layout, character 4: 'x' is unknown: use E, t, m, L, |, (, ) and *\n  Et|tx|tL\n      ^"
    )
