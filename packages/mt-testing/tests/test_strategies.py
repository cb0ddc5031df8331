import math

import pytest
from hypothesis import find, given, settings
from mt_testing import layouts

AXES = ("tp", "cp", "ep", "dp", "pp", "etp")


@settings(max_examples=100, deadline=None)
@given(layouts(max_world=48, axes=AXES))
def test_layouts_stay_within_the_world_and_experts_divide_it(layout):
    assert tuple(layout) == AXES
    dense = layout["tp"] * layout["cp"] * layout["dp"]
    assert 1 <= dense * layout["pp"] <= 48
    assert dense % (layout["ep"] * layout["etp"]) == 0


@settings(max_examples=50, deadline=None)
@given(layouts(world=24))
def test_layouts_of_one_world_have_exactly_its_size(layout):
    assert math.prod(layout[axis] for axis in ("tp", "cp", "dp", "pp")) == 24


def test_layouts_reach_every_axis_and_shrink_to_one():
    for axis in AXES:
        found = find(layouts(axes=AXES), lambda layout, axis=axis: layout[axis] > 1)
        assert found[axis] == 2
    assert find(layouts(), lambda _: True) == dict.fromkeys(("tp", "cp", "ep", "dp", "pp"), 1)


def test_axes_left_out_are_not_drawn():
    assert find(layouts(axes=("pp", "tp")), lambda _: True) == {"pp": 1, "tp": 1}


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"axes": ("tp", "vp")}, r"unknown axes \['vp'\]; use tp, cp, dp, pp, ep, etp"),
        ({"axes": ("tp", "tp")}, "repeat a name"),
        ({"max_world": 0}, "max_world is 0"),
        ({"max_world": 10**18}, "must be 1 to 1048576"),
        ({"world": 10**18}, "must be 1 to 1048576"),
        ({"world": 8, "axes": ("tp",)}, 'needs "dp"'),
    ],
)
def test_impossible_requests_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        layouts(**arguments)
