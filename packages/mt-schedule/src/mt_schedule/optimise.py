"""Search for the fastest schedule for given costs, within a memory limit."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mt_schedule.action import require_kind, require_positive, require_size
from mt_schedule.costs import Costs
from mt_schedule.greedy import Policy, schedule_greedily
from mt_schedule.ir import Schedule
from mt_schedule.schedules import SCHEDULES, make_schedule
from mt_schedule.schedules.looped import group_sizes
from mt_schedule.simulator import simulate
from mt_schedule.split import place_stages

_PATIENCE = (0.0, 0.5, 1.0)


def optimise(
    costs: Costs,
    memory_cap: float | Sequence[float] = math.inf,
    *,
    ranks: int,
    microbatches: int,
    trials: int = 300,
    two_copies: bool = True,
) -> Schedule:
    """Search for the schedule with the smallest simulated makespan for given costs.

    Candidates are all schedules of `make_schedule` with all their options, and greedy schedules
    with split backwards for looped and V-shaped placement under several policies. The best
    candidate is then improved by `trials` random exchanges of neighbouring actions, as long as
    these do not make it slower. So the result is never slower than the best named schedule within
    the limit. The same arguments give the same result.

    Args:
        costs: Costs of the pieces of the model, in the order in which data passes them. The number
            of pieces is a multiple of `ranks` and is read from the length of a sequence, so at
            least one of the costs must be a sequence; a single number applies to every piece. A
            schedule with fewer, longer stages joins neighbouring pieces, at the costs
            `costs.merged(schedule.depth)`, which `simulate` computes by itself.
        memory_cap: Largest size in bytes of the activations of a rank, one number or one for each
            rank. Parameters are not counted.
        ranks: Number of pipeline ranks.
        microbatches: Number of micro-batches.
        trials: Number of random exchanges to try, below a million.
        two_copies: Whether dualpipe may be chosen, which holds all parameters twice.

    Returns:
        The fastest schedule found, with its peak declared; its name tells its origin.

    Raises:
        ValueError: All costs are single numbers, the number of pieces is not a multiple of the
            number of ranks, or no schedule keeps the limit.
    """
    require_positive("ranks", ranks)
    require_positive("trials", trials + 1, 10**6)
    require_kind(costs, Costs)
    pieces = costs.stages
    if pieces is None:
        raise ValueError(
            "costs are single numbers, so the number of pieces of the model is unknown: give one "
            f"number for each piece, for example forward=[{costs.forward}] * {2 * ranks} for two "
            f"pieces on each of {ranks} ranks"
        )
    if pieces % ranks:
        raise ValueError(
            f"costs are for {pieces} pieces of the model, which {ranks} ranks cannot share evenly: "
            f"give a multiple of {ranks}"
        )
    caps = [float(memory_cap)] * ranks if isinstance(memory_cap, int | float) else list(memory_cap)
    if len(caps) != ranks or any(not cap > 0 for cap in caps):
        raise ValueError(f"memory_cap is {memory_cap}: expected one number above 0, or {ranks}")
    require_size(pieces, microbatches)
    costs = costs.merged(pieces)
    found: list[tuple[float, int, Schedule]] = []
    least = math.inf
    for number, schedule in enumerate(_candidates(costs, caps, ranks, microbatches)):
        if schedule.directions > 1 and not two_copies:
            continue
        simulated = simulate(schedule, costs=costs)
        least = min(least, max(simulated.peak_bytes))
        if _fits(simulated.peak_bytes, caps):
            found.append((simulated.makespan, number, schedule))
    if not found:
        raise ValueError(
            f"no schedule keeps to memory_cap {memory_cap}: the smallest one takes {least:g} "
            "bytes on a rank; raise the cap, use smaller micro-batches or recompute"
        )
    best = min(found)[2]
    return _improve(best, costs, caps, trials)


def _fits(sizes: Sequence[float], caps: Sequence[float]) -> bool:
    return all(size <= cap * (1 + 1e-9) for size, cap in zip(sizes, caps, strict=True))


def _candidates(
    costs: Costs, caps: Sequence[float], ranks: int, microbatches: int
) -> Iterator[Schedule]:
    chunks = (costs.stages or ranks) // ranks
    splits = [each for each in range(1, chunks + 1) if chunks % each == 0]
    for name in SCHEDULES:
        for options in _options(name, ranks, microbatches, splits):
            try:
                schedule = make_schedule(name, ranks, microbatches, **options)
            except ValueError:  # it cannot take this many
                continue
            if (costs.stages or schedule.depth) % schedule.depth == 0:
                yield schedule
    for each in splits:
        for v_shape in (False, True) if each > 1 else (False,):
            placement = place_stages(ranks, each, v_shape=v_shape)
            yield from _greedy(costs, caps, placement, microbatches)


def _options(
    name: str, ranks: int, microbatches: int, splits: Sequence[int]
) -> Iterator[Mapping[str, Any]]:
    """Every set of options of a named schedule."""
    if name == "1f1b":
        yield from ({"overlap": overlap} for overlap in (False, True))
    elif name == "bfs":
        yield from ({"chunks": chunks} for chunks in splits)
    elif name == "interleaved":
        groups = group_sizes(ranks, microbatches) or [None]
        for chunks, group, overlap in itertools.product(splits, groups, (False, True)):
            if chunks > 1 or group == groups[0]:  # a single chunk is visited in one order only
                yield {"chunks": chunks, "group": group, "overlap": overlap}
    else:
        yield {}


def _greedy(
    costs: Costs, caps: Sequence[float], placement: tuple[int, ...], microbatches: int
) -> Iterator[Schedule]:
    shape = Schedule(
        name="shape",
        stages=len(placement),
        microbatches=microbatches,
        ranks=((),) * len(caps),
        stage_ranks=placement,
    )
    own = costs.merged(shape.stages)
    sizes = list(own.activation_bytes)  # pyright: ignore[reportArgumentType]
    each = [sum(sizes[stage] for stage in shape.stages_of(rank)) for rank in range(len(caps))]
    for most, forward, weight, last in itertools.product(
        (1.0, 1.5, 2.0, math.inf), _PATIENCE, _PATIENCE, (True, False)
    ):
        policy = Policy(forward_patience=forward, weight_patience=weight, last_stage_first=last)
        # As many micro-batches as ranks fill the pipeline.
        number = min(most * len(caps), microbatches)
        limits = [min(cap, number * size) for cap, size in zip(caps, each, strict=True)]
        made = schedule_greedily(shape, own, limits, policy)
        if made is not None:
            yield made


def _improve(schedule: Schedule, costs: Costs, caps: Sequence[float], trials: int) -> Schedule:
    """Exchange neighbouring actions at random, and keep every change that is not slower."""
    chance = random.Random(0)  # noqa: S311 (a search, not a secret)
    best = simulate(schedule, costs=costs)
    for _ in range(trials):
        rank = chance.randrange(len(schedule.ranks))
        actions = list(schedule.ranks[rank])
        if len(actions) < 2:
            continue
        place = chance.randrange(len(actions) - 1)
        to = min(place + chance.choice((1, 1, 2, 3)), len(actions) - 1)
        actions.insert(to, actions.pop(place))
        ranks = (*schedule.ranks[:rank], tuple(actions), *schedule.ranks[rank + 1 :])
        neighbours = {pair for actions in ranks for pair in itertools.pairwise(actions)}
        changed = dataclasses.replace(
            schedule,
            ranks=ranks,
            peak_activations=None,
            pairs=schedule.pairs & neighbours,  # other pairs can no longer run as one
        )
        try:
            simulated = simulate(changed, costs=costs)
        except ValueError:  # it deadlocks
            continue
        if simulated.makespan <= best.makespan and _fits(simulated.peak_bytes, caps):
            schedule, best = changed, simulated
    return dataclasses.replace(
        schedule, name=f"optimised {schedule.name}", peak_activations=best.peak_activations
    )
