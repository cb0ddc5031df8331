"""Every generator takes the time and the memory that its paper says, over a grid of sizes.

Times are in units of one F of a stage; B takes 2 and where it is split I and W take 1 each. What is
beside a paper's own formula (fewer micro-batches than it is for) was found by simulation, and
pinned.
"""

import random

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
    simulate,
)


def one_pass(p, m, v):
    return 3 * (m + p - 1)


def looped(p, m, v):
    return 3 * (v * max(m, p) + min(m, p) - 1)


def zb_h(p, m, v):
    return 3 * m + max(p - 1, 2 * p - 1 - m)


def zb_v(p, m, v):
    return 6 * m + max(p - 1, 3 * p - 1 - 2 * m, 4 * p - 1 - 4 * m)


def v_half(p, m, v):
    return 6 * m + {1: 0, 2: 3}.get(p, max(3 * p - 4, 4 * p - 3 - 2 * m))


def v_min(p, m, v):
    if p == 1:
        return 6 * m
    return 6 * m + (4 * p - 3 if p % 3 == 0 and m > 1 else 4 * p - 5)


def dualpipe(p, m, v):
    return 3 * m + 2 * (p // 2 - 1)


def dualpipe_v(p, m, v):
    return 6 * m + 2 * (p - 1)


MAKESPAN = {
    "gpipe": one_pass,
    "1f1b": one_pass,
    "interleaved": looped,
    "bfs": looped,
    "zb-h1": zb_h,
    "zb-h2": zb_h,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe": dualpipe,
    "dualpipe-v": dualpipe_v,
}

# From a rank's first action to its last: the papers' measure of zero bubble.
LONGEST_RANK = {
    "zb-h1": zb_h,
    "zb-h2": lambda p, m, v: 3 * m + max(0, 2 * p - 1 - m),
    "zb-v": lambda p, m, v: 6 * m + max(0, 2 * p - 1 - m, 4 * p - 1 - 4 * m),
}

PEAK = {  # of rank r, in activations of one stage
    "gpipe": lambda p, m, v, r: m,
    "1f1b": lambda p, m, v, r: min(p - r, m),
    "bfs": lambda p, m, v, r: m * v,
    "zb-h1": lambda p, m, v, r: min(p, m),
    "zb-h2": lambda p, m, v, r: min(2 * p - 1, m),
    "zb-v": lambda p, m, v, r: min(2 * p, 2 * m),
    "v-half": lambda p, m, v, r: min(2 * (p // 2 + 1), 2 * m),
    "v-min": lambda p, m, v, r: min(2 * ((p + 4) // 3), 2 * m),
    "dualpipe": lambda p, m, v, r: p + 1,
    "dualpipe-v": lambda p, m, v, r: 2 * p + 1,
}


def takes(name: str, p: int, m: int) -> bool:
    if name == "dualpipe":
        return p % 2 == 0 and m % 2 == 0 and m >= 2 * p
    return name != "dualpipe-v" or m >= 2 * p


def is_looped(name: str) -> bool:
    return name in ("interleaved", "bfs")


def assert_closed_forms(name: str, p: int, m: int, v: int, **options) -> None:
    if is_looped(name):
        options["chunks"] = v
    schedule = make_schedule(name, p, m, **options)
    assert check(schedule) == []
    simulated = simulate(schedule)
    makespan = MAKESPAN[name](p, m, v)
    assert simulated.makespan == pytest.approx(makespan)
    per_rank = 3 * m * len(schedule.stage_ranks) / schedule.directions / p
    assert simulated.bubble == pytest.approx([1 - per_rank / makespan] * p)
    if name in LONGEST_RANK:
        assert simulated.longest_rank == pytest.approx(LONGEST_RANK[name](p, m, v))
    declared = schedule.peak_activations
    assert all(a <= b for a, b in zip(simulated.peak_activations, declared, strict=True))
    if name in PEAK:
        assert list(declared) == [PEAK[name](p, m, v, rank) for rank in range(p)]
        assert max(simulated.peak_activations) == max(declared)
    if name in ("gpipe", "1f1b", "interleaved", "bfs", "dualpipe", "dualpipe-v"):
        assert simulated.peak_activations == declared


GRID = [
    (name, p, m, v)
    for name in SCHEDULES
    for p in range(1, 9)
    for m in range(1, 33)
    for v in (range(1, 5) if is_looped(name) else (1,))
    if takes(name, p, m)
]


def assert_overlapped_closed_forms(p: int, m: int, v: int, n: int) -> None:
    """Interleaved 1F1B in groups of n, and of one chunk 1F1B, whose pairs gain up to all of F."""
    options = {"chunks": v, "group": n if n >= p else None}
    schedules = [make_schedule("interleaved", p, m, overlap=True, **options)]
    if v == 1:
        schedules.append(make_schedule("1f1b", p, m, overlap=True))
    for schedule in schedules:
        assert check(schedule) == []
        peaks = tuple(min(2 * (p - r - 1) + (v - 1) * n + 2, m * v) for r in range(p))
        assert schedule.peak_activations == peaks
        for share in (1.0, 0.8, 2 / 3):
            simulated = simulate(schedule, costs=Costs(pair_share=share))
            pairs = max(0, v * m - (v - 1) * n - 1)
            makespan = looped(p, m, v) - (1 - share) * 3 * pairs
            assert simulated.makespan == pytest.approx(makespan)
            assert simulated.peak_activations == peaks


OVERLAPPED = [
    (p, m, v, n)
    for p in range(1, 9)
    for m in range(1, 33)
    for v in range(1, 5)
    for n in ([n for n in range(p, m + 1) if m % n == 0 or m % n >= p] or [m])
]


def test_a_sample_of_overlapped_pairs_has_the_closed_forms():
    for row in random.Random(0).sample(OVERLAPPED, 30):
        assert_overlapped_closed_forms(*row)


@pytest.mark.campaign
@pytest.mark.parametrize("p", range(1, 9))
def test_all_overlapped_pairs_have_the_closed_forms(p):
    for row in OVERLAPPED:
        if row[0] == p:
            assert_overlapped_closed_forms(*row)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_sample_of_the_grid_has_the_closed_forms(name):
    rows = [row for row in GRID if row[0] == name]
    for row in random.Random(0).sample(rows, 14):
        assert_closed_forms(*row)


@pytest.mark.campaign
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_whole_grid_has_the_closed_forms(name):
    for row in GRID:
        if row[0] == name:
            assert_closed_forms(*row)


@pytest.mark.campaign
@pytest.mark.parametrize("p", range(1, 9))
def test_every_group_size_has_the_closed_form(p):
    for m in range(p, 33):
        for group in range(p, m + 1):
            if m % group == 0 or m % group >= p:
                assert_closed_forms("interleaved", p, m, 2, group=group)


@pytest.mark.campaign
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_whole_grid_communicates_without_deadlock(name):
    for row in [row for row in GRID if row[0] == name][::5]:
        chunks = {"chunks": row[3]} if is_looped(name) else {}
        assert check(insert_communication(make_schedule(*row[:3], **chunks))) == []


def test_the_tables_of_formulas_are_complete():
    assert set(MAKESPAN) == set(SCHEDULES)
    assert set(PEAK) | {"interleaved"} == set(SCHEDULES)


@pytest.mark.parametrize(("forward", "backward"), [(1.0, 2.0), (1.0, 1.5), (2.0, 1.0)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "bfs"])
def test_whole_backwards_have_the_closed_form_for_any_times(name, forward, backward):
    options = {"chunks": 3} if is_looped(name) else {}
    simulated = simulate(
        make_schedule(name, 4, 8, **options), Costs(forward=forward, backward=backward)
    )
    wanted = MAKESPAN[name](4, 8, 3) / 3 * (forward + backward)
    assert simulated.makespan == pytest.approx(wanted)


@pytest.mark.parametrize("overlap", [1.0, 0.8, 0.7])
@pytest.mark.parametrize(("name", "n", "m"), [("dualpipe", 4, 18), ("dualpipe-v", 4, 9)])
def test_bidirectional_bubble_is_the_papers_for_any_gain_of_overlap(name, n, m, overlap):
    p = 2 * n if name == "dualpipe" else n
    schedule = make_schedule(name, p, m)
    forward, backward, weight = 1.0, 2.0, 1.0
    costs = Costs(forward=forward, backward=backward, weight=weight, pair_share=overlap)
    simulated = simulate(schedule, costs=costs)
    both = overlap * (forward + backward)
    idle = [share * simulated.makespan for share in simulated.bubble]
    assert max(idle) == pytest.approx((n - 1) * (both + backward - 3 * weight))


def test_v_schedules_are_the_papers_shares_of_1f1bs_bubble_and_memory():
    p, m = 24, 96
    own = {name: simulate(make_schedule(name, p, m)) for name in ("zb-v", "v-half", "v-min")}
    bubble = 6 * (p - 1)  # of 1F1B, in times of half a rank's layers
    idle = {name: simulated.longest_rank - 6 * m for name, simulated in own.items()}
    assert idle["zb-v"] == 0
    assert idle["v-half"] / bubble == pytest.approx(1 / 2, abs=0.02)
    assert idle["v-min"] / bubble == pytest.approx(2 / 3, abs=0.03)
    memory = {name: max(s.peak_activations) / (2 * p) for name, s in own.items()}
    assert memory["zb-v"] == 1
    assert memory["v-half"] == pytest.approx(1 / 2, abs=0.05)
    assert memory["v-min"] == pytest.approx(1 / 3, abs=0.06)


def event_times(schedule: Schedule, costs: Costs, times: dict[Action, float]) -> dict:
    """When each action ends, by repeating what must hold until nothing changes."""
    depth = schedule.stages // schedule.directions
    holder, ends = schedule.stage_ranks, {}
    changed = True
    while changed:
        changed = False
        for rank, actions in enumerate(schedule.ranks):
            free, index = 0.0, 0
            while index < len(actions):
                pair = actions[index : index + 2]
                unit = pair if pair in schedule.pairs else pair[:1]
                begin = free
                for op, stage, number in unit:
                    sources = []
                    if op is Op.F and stage % depth:
                        sources = [Action(Op.F, stage - 1, number)]
                    elif op in (Op.B, Op.I) and (stage + 1) % depth:
                        sources = [Action(o, stage + 1, number) for o in (Op.B, Op.I)]
                    for source in sources:
                        away = costs.latency * (holder[source.stage] != rank)
                        begin = max(begin, ends.get(source, 0.0) + away * (source in ends))
                free = begin + sum(times[a] for a in unit) * (costs.pair_share if unit[1:] else 1)
                for action in unit:
                    changed = changed or ends.get(action) != free
                    ends[action] = free
                index += len(unit)
    return ends


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(list(SCHEDULES)),
    p=st.integers(2, 5),
    extra=st.integers(0, 4),
    seed=st.integers(0, 10**6),
    latency=st.floats(0, 3),
)
def test_simulation_is_the_longest_path_for_random_times_and_delays(name, p, extra, seed, latency):
    p, extra = (p + p % 2, extra + extra % 2) if name == "dualpipe" else (p, extra)
    schedule = make_schedule(name, p, 2 * p + extra)
    chance = random.Random(seed)
    forward, inputs, weight = (
        [chance.uniform(0.1, 5) for _ in range(schedule.depth)] for _ in range(3)
    )
    backward = [sum(both) for both in zip(inputs, weight, strict=True)]
    costs = Costs(
        forward=forward,
        backward=backward,
        weight=weight,
        latency=latency,
        pair_share=chance.uniform(0.5, 1),
    )
    of_op = {Op.F: forward, Op.B: backward, Op.I: inputs, Op.W: weight}
    times = {a: of_op[a.op][a.stage % schedule.depth] for _, _, a in schedule}
    simulated = simulate(schedule, costs=costs)
    ends = {span.action: span.end for spans in simulated.timeline for span in spans}
    assert ends == pytest.approx(event_times(schedule, costs, times))
    assert simulated.makespan == pytest.approx(max(ends.values()))


@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from(list(SCHEDULES)), p=st.integers(9, 20), m=st.integers(1, 60))
def test_larger_schedules_have_the_closed_forms(name, p, m):
    if name.startswith("dualpipe"):
        p, m = p + p % 2, 2 * (p + 1) + m + m % 2
    assert_closed_forms(name, p, m, 2)
