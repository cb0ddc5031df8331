"""Rank arithmetic against golden groups of Megatron-LM and against a definition by brute force."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_parallel_state import ParallelLayout
from mt_parallel_state import layout as layout_module

DEFAULT = ParallelLayout(tp=2, cp=2, dp=2, pp=2, ep=1, etp=1, order="tp-cp-ep-dp-pp")


@pytest.mark.parametrize(
    ("axes", "first"),
    [
        ("tp", [[0, 1]]),
        ("cp", [[0, 2], [1, 3]]),
        ("dp", [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12]]),
        ("pp", [[0, 8], [1, 9]]),
        ("dp-cp", [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]),
        ("tp-dp-cp", [list(range(8)), list(range(8, 16))]),
        ("tp-pp", [[0, 1, 8, 9], [2, 3, 10, 11]]),
        ("embedding", [[0, 8], [1, 9]]),
    ],
)
def test_dense_groups_match_megatron_goldens(axes: str, first: list[list[int]]) -> None:
    groups = DEFAULT.groups(axes)
    assert groups[: len(first)] == first
    assert sorted(itertools.chain(*groups)) == list(range(16))


@pytest.mark.parametrize(
    ("axes", "first"),
    [
        ("ep", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("edp", [[0, 4], [1, 5]]),
        ("dp-ep", [list(range(8))]),
        ("tp-ep-pp", [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]),
        ("etp", [[0], [1]]),
    ],
)
def test_expert_groups_match_megatron_goldens(axes: str, first: list[list[int]]) -> None:
    layout = ParallelLayout(tp=2, cp=2, dp=2, pp=2, ep=4, etp=1)
    assert layout.edp == 2
    assert layout.groups(axes)[: len(first)] == first


def test_order_with_pp_before_dp_matches_megatron_goldens() -> None:
    layout = ParallelLayout(tp=2, cp=2, dp=2, pp=2, ep=4, etp=1, order="tp-cp-ep-pp-dp")
    assert layout.groups("dp")[0] == [0, 8]
    assert layout.groups("pp")[0] == [0, 4]


def test_tp2_pp4_dp2_matches_megatron_goldens() -> None:
    layout = ParallelLayout(tp=2, pp=4, dp=2)
    assert layout.groups("dp")[:3] == [[0, 2], [1, 3], [4, 6]]
    assert layout.groups("pp")[0] == [0, 4, 8, 12]
    assert layout.groups("embedding")[0] == [0, 12]


@st.composite
def _layouts(draw: st.DrawFn) -> ParallelLayout:
    sizes = {axis: draw(st.sampled_from([1, 2, 3, 4])) for axis in ("tp", "cp", "dp", "pp")}
    order = "-".join(draw(st.permutations(["tp", "cp", "ep", "dp", "pp"])))
    stage = sizes["tp"] * sizes["cp"] * sizes["dp"]
    ep = draw(st.sampled_from([d for d in range(1, stage + 1) if stage % d == 0]))
    etp = draw(st.sampled_from([d for d in range(1, stage // ep + 1) if stage // ep % d == 0]))
    before_pp = order.split("-")[: order.split("-").index("pp")]
    dense = prod(sizes[axis] for axis in before_pp if axis != "ep")
    view = {"tp": etp, "cp": 1, "ep": ep, "dp": stage // (ep * etp)}
    experts = ep > 1 or etp != sizes["tp"]
    if experts and sizes["pp"] > 1 and dense != prod(view[axis] for axis in before_pp):
        order = order.replace("pp-", "").replace("-pp", "") + "-pp"
    return ParallelLayout(**sizes, ep=ep, etp=etp, order=order)


def _brute_force(layout: ParallelLayout, axes: str) -> list[list[int]]:
    """Enumerate the world by its definition: nested loops in reversed order, rank counts up."""
    expert = bool({"ep", "etp", "edp"} & set(axes.split("-")))
    if expert and layout.ep == 1 and layout.etp == layout.tp:  # no experts: the dense view
        dense = {"etp": "tp", "tp": "tp", "edp": "dp-cp", "dp": "dp-cp", "pp": "pp"}
        axes, expert = "-".join(dense[a] for a in axes.split("-") if a != "ep"), False
    rename = {"tp": "etp", "dp": "edp"} if expert else {}
    names = [rename.get(a, a) for a in layout.order.split("-") if a != ("cp" if expert else "ep")]
    chosen = {rename.get(a, a) for a in axes.split("-")}
    buckets: dict[tuple[int, ...], list[int]] = {}
    loops = itertools.product(*(range(layout.size(n)) for n in reversed(names)))
    for rank, index in enumerate(loops):
        at = dict(zip(reversed(names), index, strict=True))
        key = tuple(at[n] for n in names if n not in chosen)
        buckets.setdefault(key, []).append(rank)
    return sorted(buckets.values())


@settings(max_examples=60, deadline=None)
@given(layout=_layouts(), data=st.data())
def test_groups_equal_the_brute_force_definition(
    layout: ParallelLayout, data: st.DataObject
) -> None:
    pool = data.draw(st.sampled_from([("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")]))
    axes = "-".join(data.draw(st.lists(st.sampled_from(pool), min_size=1, unique=True)))
    groups = layout.groups(axes)
    assert groups == _brute_force(layout, axes)
    assert {len(group) for group in groups} == {layout.size(axes)}
    rank = data.draw(st.integers(0, layout.world_size - 1))
    assert layout.group_of(axes, rank) in groups
    assert rank in layout.group_of(axes, rank)


@settings(max_examples=30, deadline=None)
@given(layout=_layouts())
def test_ranks_and_coordinates_are_one_to_one_in_both_views(layout: ParallelLayout) -> None:
    found = [layout.coordinates(rank) for rank in range(layout.world_size)]
    for view in (("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")):
        every = itertools.product(*(range(layout.size(axis)) for axis in view))
        assert sorted(tuple(at[axis] for axis in view) for at in found) == sorted(every)


@settings(max_examples=30, deadline=None)
@given(layout=_layouts())
def test_both_views_form_the_same_pipeline_groups(layout: ParallelLayout) -> None:
    expert_pp = _brute_force(layout, "etp-ep-edp")  # complement: one group per stage
    assert sorted(layout.groups("tp-cp-dp")) == expert_pp


@given(
    sizes=st.fixed_dictionaries({axis: st.integers(1, 5) for axis in ("tp", "cp", "dp", "pp")}),
    order=st.permutations(["tp", "cp", "ep", "dp", "pp"]),
)
def test_a_layout_without_experts_never_fails_for_the_expert_view(
    sizes: dict[str, int], order: list[str]
) -> None:
    layout = ParallelLayout(**sizes, order="-".join(order))
    assert layout.groups("edp") == layout.groups("dp-cp")
    assert layout.groups("etp") == layout.groups("tp")
    assert layout.groups("ep") == [[rank] for rank in range(layout.world_size)]


def test_three_stages_of_three_by_four_by_four_need_no_experts() -> None:
    layout = ParallelLayout(tp=3, cp=4, dp=4, pp=3, order="tp-cp-ep-pp-dp")
    assert layout.group_of("pp", 0) == [0, 12, 24]
    assert layout.group_of("edp", 0) == layout.group_of("dp-cp", 0)


def test_a_world_of_thousands_answers_for_one_rank_at_once() -> None:
    layout = ParallelLayout(tp=8, cp=2, dp=64, pp=16, ep=64)
    assert layout.world_size == 16384
    assert layout.group_of("pp", 16383)[0] == 1023
    assert len(layout.groups("dp-cp")) == 128


def test_etp_defaults_to_tp_only_without_expert_parallelism() -> None:
    assert ParallelLayout(tp=4).etp == 4
    assert ParallelLayout(tp=4, ep=2).etp == 1
    assert ParallelLayout(tp=4) == ParallelLayout(tp=4, etp=4)


def test_fit_derives_dp_and_names_sizes_when_it_cannot() -> None:
    assert ParallelLayout.fit(16, tp=2, pp=4) == ParallelLayout(tp=2, pp=4, dp=2)
    with pytest.raises(
        ValueError, match=r"12 ranks cannot hold tp=2 x cp=1 x pp=4.* 8 or 16 ranks"
    ):
        ParallelLayout.fit(12, tp=2, pp=4)
    with pytest.raises(ValueError, match=r"world of 4 ranks.*use a world of 8 ranks"):
        ParallelLayout.fit(4, tp=8)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"tp": 0}, ValueError, "tp must be at least 1, got 0"),
        ({"tp": 2.0}, TypeError, "tp must be an int, got 2.0"),
        ({"dp": True}, TypeError, "dp must be an int, got True"),
        ({"order": None}, TypeError, "order must be a string such as .*, got None"),
        ({"tp": 10**12}, ValueError, "make 1000000000000 ranks; a layout has at most 1048576"),
        ({"order": "tp-xp"}, ValueError, "order 'tp-xp' has 'xp'"),
        ({"order": "tp-tp"}, ValueError, "names tp twice"),
        ({"dp": 2, "order": "tp-pp"}, ValueError, "leaves out dp, which has size 2"),
        ({"tp": 2, "ep": 3}, ValueError, r"etp=1 x ep=3 = 3 does not divide the 2 ranks"),
        (
            {"tp": 2, "dp": 4, "pp": 2, "ep": 4, "order": "tp-cp-ep-pp-dp"},
            ValueError,
            r"tp=2, cp=1, dp=4, pp=2\) and the expert view \(etp=1, ep=4, edp=2, pp=2\)",
        ),
    ],
)
def test_invalid_layouts_say_what_is_wrong(kwargs: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        ParallelLayout(**kwargs)


def test_unknown_axes_get_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"unknown axis 'tpp'.*Did you mean tp\?"):
        DEFAULT.groups("dp-tpp")
    with pytest.raises(ValueError, match="name an axis twice"):
        DEFAULT.size("tp-tp")
    with pytest.raises(ValueError, match="has no cp axis"):
        DEFAULT.groups("cp-ep")
    with pytest.raises(ValueError, match=r"rank 16 is out of range.*0 to 15"):
        DEFAULT.coordinates(16)


def test_rank_arithmetic_needs_no_torch() -> None:
    folder = Path(layout_module.__file__).parent
    code = (
        "import importlib.util, sys, types\n"
        "sys.modules['mt_parallel_state'] = types.ModuleType('mt_parallel_state')\n"
        "for name in ('levels', 'layout', 'spec'):\n"
        "    full = 'mt_parallel_state.' + name\n"
        f"    path = {str(folder)!r} + '/' + name + '.py'\n"
        "    spec = importlib.util.spec_from_file_location(full, path)\n"
        "    sys.modules[full] = importlib.util.module_from_spec(spec)\n"
        "    spec.loader.exec_module(sys.modules[full])\n"
        "assert sys.modules[full].PartitionSpec\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_world_of_16384_ranks_is_enumerated_in_a_second() -> None:
    layout = ParallelLayout.fit(16384, tp=8, cp=2, pp=16, ep=64, etp=1)
    started = time.process_time()
    for axes in ("tp", "cp", "dp", "pp", "dp-cp", "tp-cp", "ep", "edp", "tp-ep-pp", "embedding"):
        groups = layout.groups(axes)
        assert sum(map(len, groups)) in (16384, 2048)
    assert time.process_time() - started < 1.0


def test_mirrored_pipeline_ranks_are_pairs() -> None:
    layout = ParallelLayout(tp=2, pp=4)
    assert layout.groups("mirror") == [[0, 6], [2, 4], [1, 7], [3, 5]]
    assert [layout.group_of("mirror", rank) for rank in (0, 4, 7)] == [[0, 6], [2, 4], [1, 7]]
    assert ParallelLayout(pp=3).groups("mirror") == [[0, 2], [1]]
    assert ParallelLayout(tp=2).size("mirror") == 1
