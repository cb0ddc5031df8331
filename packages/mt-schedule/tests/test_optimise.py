"""The search finds right schedules that fit the memory and are no slower than the named ones."""

import dataclasses
import itertools
import math

import pytest
from mt_schedule import (
    SCHEDULES,
    Costs,
    check,
    insert_communication,
    make_schedule,
    optimise,
    simulate,
)
from mt_schedule.optimise import _improve

RANKS, MICROBATCHES, PIECES = 4, 12, 8


def profile(**changed) -> Costs:
    even = {"forward": 1.0, "backward": 2.0, "weight": 1.0, "activation_bytes": 1.0}
    options = {**{name: [value] * PIECES for name, value in even.items()}, **changed}
    return Costs(**options)


# Shapes that papers and trainers report: in times of one piece's forward.
PROFILES = {
    "uniform": profile(),
    "uneven head": profile(
        forward=[1.0] * 7 + [1.8], backward=[2.0] * 7 + [3.6], weight=[1.0] * 7 + [1.8]
    ),
    "heavy embedding": profile(
        forward=[1.6] + [1.0] * 7, backward=[3.0] + [2.0] * 7, weight=[1.6] + [1.0] * 7
    ),
    "slow link": profile(latency=0.5),
    "narrow link": profile(message_bytes=1.0, bandwidth=4.0, latency=0.1),
    "W cheaper than I": profile(weight=[0.6] * PIECES),
    "W dearer than I": profile(weight=[1.3] * PIECES, backward=[2.2] * PIECES),
    "recompute": profile(backward=[3.0] * PIECES),
    "both ends heavy": profile(
        forward=[1.5] + [1.0] * 6 + [1.5], backward=[3.0] + [2.0] * 6 + [3.0]
    ),
    "every other layer of experts": profile(
        forward=[1.0, 1.6] * 4, backward=[2.0, 3.0] * 4, weight=[1.0, 1.2] * 4
    ),
}


def options_of(name: str, ranks: int, microbatches: int, chunks: int) -> list[dict]:
    """Every set of options of a named schedule that it may take, and some that it does not."""
    splits = [{"chunks": each} for each in range(1, chunks + 1)]
    if name == "bfs":
        return splits
    if name not in ("1f1b", "interleaved"):
        return [{}]
    overlaps = [{"overlap": overlap} for overlap in (False, True)]
    if name == "1f1b":
        return overlaps
    groups = [{"group": n} for n in (None, *range(ranks, microbatches + 1))]
    return [a | b | c for a, b, c in itertools.product(splits, groups, overlaps)]


def named(costs: Costs, cap: float, microbatches: int = MICROBATCHES) -> dict[str, float]:
    """The least makespans of the named schedules that keep to the cap, over all their options."""
    found: dict[str, float] = {}
    for name in SCHEDULES:
        for options in options_of(name, RANKS, microbatches, PIECES // RANKS):
            try:
                schedule = make_schedule(name, RANKS, microbatches, **options)
            except ValueError:  # no valid group
                continue
            simulated = simulate(schedule, costs=costs)
            if max(simulated.peak_bytes) <= cap:
                found[name] = min(simulated.makespan, found.get(name, simulated.makespan))
    return found


@pytest.mark.parametrize("two_copies", [True, False])
@pytest.mark.parametrize("name", PROFILES)
def test_it_beats_interleaved_1f1b_within_its_memory(name, two_copies):
    costs = PROFILES[name]
    interleaved = simulate(make_schedule("interleaved", RANKS, MICROBATCHES), costs=costs)
    cap = max(interleaved.peak_bytes)
    best = optimise(
        costs, cap, ranks=RANKS, microbatches=MICROBATCHES, trials=100, two_copies=two_copies
    )
    assert check(best) == []
    assert check(insert_communication(best, costs=costs.merged(best.depth))) == []
    simulated = simulate(best, costs=costs)
    assert max(simulated.peak_bytes) <= cap
    assert simulated.peak_activations == best.peak_activations
    assert simulated.makespan < interleaved.makespan
    others = named(costs, cap)
    if not two_copies:
        others.pop("dualpipe", None)
        assert best.directions == 1
    assert simulated.makespan <= min(others.values())


def test_it_beats_every_named_schedule_where_none_is_made_for_the_costs():
    costs = PROFILES["slow link"]
    best = optimise(costs, 11.0, ranks=RANKS, microbatches=MICROBATCHES)
    assert simulate(best, costs=costs).makespan < min(named(costs, 11.0).values())


def test_it_is_no_slower_than_interleaved_1f1b_with_the_best_group():
    costs = profile(weight=[0.0] * PIECES, latency=2.0)
    interleaved = simulate(make_schedule("interleaved", RANKS, 16, group=16), costs=costs)
    assert (interleaved.makespan, max(interleaved.peak_bytes)) == (123.0, 23.0)
    assert named(costs, 23.0, 16)["interleaved"] <= 123.0
    best = optimise(costs, 23.0, ranks=RANKS, microbatches=16, trials=0)
    assert simulate(best, costs=costs).makespan <= min(named(costs, 23.0, 16).values())


def test_it_overlaps_forwards_and_backwards_where_that_is_faster():
    costs = dataclasses.replace(profile(), pair_share=0.7)
    best = optimise(costs, 16.0, ranks=RANKS, microbatches=8, trials=0, two_copies=False)
    assert best.pairs
    others = named(costs, 16.0, 8)
    others.pop("dualpipe", None)
    assert simulate(best, costs=costs).makespan <= min(others.values())


def test_exchanges_do_not_part_overlapped_pairs():
    costs = dataclasses.replace(profile(), latency=0.2)
    best = optimise(costs, ranks=2, microbatches=4, trials=300)
    assert check(best) == []
    pairs = make_schedule("dualpipe-v", 2, 4)
    for trials in (100, 200):
        changed = _improve(pairs, costs, [math.inf] * 2, trials)
        assert changed.ranks != pairs.ranks
        assert check(changed) == []


def test_less_memory_takes_longer_and_is_kept_on_each_rank():
    makespans = []
    for cap in (16.0, 8.0, 6.0, 4.0):
        best = optimise(profile(), cap, ranks=RANKS, microbatches=MICROBATCHES, trials=50)
        simulated = simulate(best, costs=profile())
        assert max(simulated.peak_bytes) <= cap
        makespans.append(simulated.makespan)
    assert makespans == sorted(makespans)
    assert makespans[0] < makespans[-1]
    caps = [4.0, 16.0, 16.0, 16.0]
    best = optimise(profile(), caps, ranks=RANKS, microbatches=MICROBATCHES, trials=50)
    sizes = simulate(best, costs=profile()).peak_bytes
    assert all(size <= cap for size, cap in zip(sizes, caps, strict=True))


def test_costs_that_are_one_number_do_not_say_how_large_a_piece_is():
    with pytest.raises(ValueError, match=r"single numbers.* forward=\[1.0\] \* 6 for two pieces"):
        optimise(Costs(latency=0.5), ranks=3, microbatches=6)
    # Beside a sequence a number is the cost of each piece, here as in `simulate`.
    costs = Costs(forward=[1.0] * 6, activation_bytes=1.0)
    best = optimise(costs, ranks=3, microbatches=6, trials=20)
    simulated = simulate(best, costs=costs)
    assert simulated == simulate(best, costs=costs.merged(6))
    assert simulated.makespan <= 6 * 6 + 2


def test_the_same_arguments_give_the_same_schedule():
    options = {"ranks": 2, "microbatches": 5, "trials": 60}
    costs = Costs(forward=[1.0, 2.0, 1.0, 1.5], latency=0.3)
    assert optimise(costs, **options) == optimise(costs, **options)


@pytest.mark.parametrize(
    ("costs", "cap", "message"),
    [
        (Costs(forward=[1.0] * 6), 9.0, "6 pieces of the model, which 4 ranks"),
        (profile(), 1.0, "no schedule keeps to memory_cap 1.0: the smallest one takes 4 bytes"),
        (profile(), 0.0, "memory_cap is 0.0: expected one number above 0, or 4"),
        (profile(), [8.0, 8.0], r"memory_cap is \[8.0, 8.0\]: expected one number above 0, or 4"),
    ],
)
def test_what_cannot_be_is_refused(costs, cap, message):
    with pytest.raises(ValueError, match=message):
        optimise(costs, cap, ranks=4, microbatches=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward": [1.0], "backward": [2.0, 2.0]}, "forward 1, backward 2.*give one per stage"),
        ({"weight": 3.0}, "weight is 3.0 and backward 2.0 at stage 0"),
        ({"latency": -1.0}, "latency is -1.0"),
        ({"bandwidth": 0.0}, "bandwidth is 0.0: expected more than 0"),
        ({"pair_share": 0.0}, "pair_share is 0.0: expected more than 0"),
        ({"forward": float("nan")}, "forward is nan: expected numbers of 0 or more"),
    ],
)
def test_costs_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Costs(**options)


def test_a_weight_that_is_not_given_stays_half_of_the_backward():
    costs = dataclasses.replace(Costs(), backward=4.0)
    assert costs.weight is None
    assert costs == Costs(backward=4.0)
    assert costs.merged(2).weight == (2.0, 2.0)
    uneven = dataclasses.replace(costs, backward=[2.0, 3.0])
    assert (uneven.merged(2).weight, uneven.merged(1).weight) == ((1.0, 1.5), (2.5,))
    # Half of 4.0: I and W take 2 each. A W of 1.0 would leave 3.
    schedule = make_schedule("zb-h1", 2, 1)
    assert (
        simulate(schedule, costs=costs).makespan == simulate(schedule, Costs(backward=4.0)).makespan
    )
    assert simulate(schedule, costs=costs).makespan == 1 + 1 + 2 + 2 + 2


def test_costs_are_joined_for_fewer_stages():
    costs = Costs(forward=[1, 2, 3, 4], message_bytes=[5, 6, 7, 8], activation_bytes=2.0)
    joined = costs.merged(2)
    assert joined.forward == (3.0, 7.0)
    assert joined.message_bytes == (6.0, 8.0)
    assert joined.activation_bytes == (4.0, 4.0)
    assert joined.backward == (4.0, 4.0)
    with pytest.raises(ValueError, match="4 stages cannot be joined to 3"):
        costs.merged(3)


def test_messages_queue_on_a_link_and_bytes_are_counted():
    costs = Costs(
        forward=1.0, backward=2.0, message_bytes=6.0, bandwidth=2.0, activation_bytes=[4.0, 3.0]
    )
    simulated = simulate(make_schedule("gpipe", 2, 2), costs=costs)
    # F0 ends at 1 and arrives at 4, F1 ends at 2 and arrives at 7: its transfer waited for F0's.
    assert [span.start for span in simulated.timeline[1]] == [4.0, 7.0, 8.0, 10.0]
    assert [span.start for span in simulated.timeline[0]] == [0.0, 1.0, 13.0, 16.0]
    assert simulated.peak_bytes == (8.0, 6.0)
