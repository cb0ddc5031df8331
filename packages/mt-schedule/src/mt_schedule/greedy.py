"""List scheduling: make a schedule for given costs by always taking the earliest action."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from mt_schedule.action import Action, Op
from mt_schedule.costs import Costs
from mt_schedule.ir import Schedule
from mt_schedule.simulator import action_times


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The preferences of a rank when several actions could come next.

    Attributes:
        forward_patience: Delay after which a backward no longer comes before a forward, in times
            of that forward.
        weight_patience: The same delay for any other action and a W, in times of that W.
        last_stage_first: Whether the action of the later stage comes first among equal actions.
    """

    forward_patience: float = 0.0
    weight_patience: float = 0.0
    last_stage_first: bool = True


def schedule_greedily(
    shape: Schedule, costs: Costs, caps: Sequence[float], policy: Policy
) -> Schedule | None:
    """Make a schedule with split backwards by list scheduling.

    Among the next actions of all ranks, the one that can begin first is taken, until none is left.

    Args:
        shape: A schedule of one direction, used for its stages, micro-batches and placement.
        costs: Costs of each of its stages.
        caps: Largest size in bytes of the activations of each rank.
        policy: The preferences of a rank.

    Returns:
        The schedule; None if the memory does not suffice.
    """
    run = _Greedy(shape, costs, caps, policy)
    while (rank := run.next_rank()) is not None:
        run.take(rank)
    total = 3 * shape.stages * shape.microbatches
    if sum(map(len, run.orders)) < total:
        return None
    return Schedule(
        name="greedy",
        stages=shape.stages,
        microbatches=shape.microbatches,
        ranks=tuple(tuple(actions) for actions in run.orders),
        stage_ranks=shape.stage_ranks,
    )


class _Greedy:
    """The state between two choices: when each rank is free, and which inputs have arrived."""

    def __init__(
        self, shape: Schedule, costs: Costs, caps: Sequence[float], policy: Policy
    ) -> None:
        stages, ranks = range(shape.stages), range(len(shape.ranks))
        self._shape, self._costs, self._caps, self._policy = shape, costs, caps, policy
        self._times = action_times(shape, costs)
        self._bytes = list(costs.activation_bytes)  # pyright: ignore[reportArgumentType]
        self._messages = list(costs.message_bytes)  # pyright: ignore[reportArgumentType]
        self._held = [shape.stages_of(rank) for rank in ranks]
        # Arrival times of the inputs of F and of I of each stage, by micro-batch. The inputs of the
        # first stage are there from the start.
        self._arrived = {op: [deque[float]() for _ in stages] for op in (Op.F, Op.I)}
        self._arrived[Op.F][0].extend([0.0] * shape.microbatches)
        self._done = {op: [0 for _ in stages] for op in (Op.F, Op.I)}
        self._weights: list[deque[Action]] = [deque() for _ in ranks]
        self._free = [0.0 for _ in ranks]
        self._live = [0.0 for _ in ranks]
        self.orders: list[list[Action]] = [[] for _ in ranks]
        self._best = [self._choose(rank) for rank in ranks]

    def next_rank(self) -> int | None:
        """Return the rank whose next action begins first."""
        starts = [(best[0], rank) for rank, best in enumerate(self._best) if best is not None]
        return min(starts)[1] if starts else None

    def take(self, rank: int) -> None:
        """Take the next action of a rank."""
        best = self._best[rank]
        assert best is not None, "asked for by `next_rank`"  # noqa: S101 (a slip of ours)
        start, action = best
        op, stage, number = action
        end = start + self._times[op][stage]
        self._free[rank] = end
        self.orders[rank].append(action)
        changed = {rank}
        if op is Op.W:
            self._weights[rank].popleft()
            self._live[rank] -= self._bytes[stage]
        else:
            self._done[op][stage] += 1
            self._arrived[op][stage].popleft()
            if op is Op.F:
                self._live[rank] += self._bytes[stage]
            else:
                self._weights[rank].append(Action(Op.W, stage, number))
            changed |= self._feed(action, end)
        for each in changed:
            self._best[each] = self._choose(each)

    def _feed(self, action: Action, end: float) -> set[int]:
        """Record the arrival of a result, and return the rank that receives it."""
        op, stage, _ = action
        forward = op is Op.F
        after = (self._shape.next_stage if forward else self._shape.previous_stage)(stage)
        if after is None:
            if not forward:
                return set()
            op, after = Op.I, stage
        holder = self._shape.stage_ranks[after]
        if holder != self._shape.stage_ranks[stage]:
            size = self._messages[min(stage, after)]
            end += self._costs.latency + (size / self._costs.bandwidth if size else 0.0)
        self._arrived[op][after].append(end)
        return {holder}

    def _choose(self, rank: int) -> tuple[float, Action] | None:
        """Return the next action of a rank in the current state, and when it could begin."""
        free, policy = self._free[rank], self._policy
        found: list[tuple[float, int, int, float, Action]] = []
        for stage in self._held[rank]:
            order = -stage if policy.last_stage_first else stage
            for op, patience in ((Op.I, 0.0), (Op.F, policy.forward_patience)):
                if self._arrived[op][stage] and (op is Op.I or self._has_room(rank, stage)):
                    start = max(free, self._arrived[op][stage][0])
                    action = Action(op, stage, self._done[op][stage])
                    key = start + patience * self._times[op][stage]
                    found.append((key, 0 if op is Op.I else 1, order, start, action))
        if self._weights[rank]:
            action = self._weights[rank][0]
            key = free + policy.weight_patience * self._times[Op.W][action.stage]
            found.append((key, 2, 0, free, action))
        return min(found)[3:] if found else None

    def _has_room(self, rank: int, stage: int) -> bool:
        """Tell whether an activation fits, together with one of each later stage of the rank.

        Without room for the later ones, no micro-batch might ever reach its backward.
        """
        later = sum(self._bytes[other] for other in self._held[rank] if other >= stage)
        return self._live[rank] + later <= self._caps[rank] * (1 + 1e-9)
