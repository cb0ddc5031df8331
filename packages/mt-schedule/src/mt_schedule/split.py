"""Division of layers into stages, and placement of stages on ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from mt_schedule.action import LARGEST, require_positive


def split_layers(
    num_layers: int,
    stages: int,
    *,
    first: int | None = None,
    last: int | None = None,
    count_embedding: bool = False,
    count_loss: bool = False,
) -> list[range]:
    """Cut a list of layers into contiguous stages of nearly equal length.

    If the layers do not divide evenly, the earliest middle stages get one more each, then the
    first stage, which also has the embedding. The last stage, which also has the head and the
    loss, never gets one more.

    Args:
        num_layers: Number of layers.
        stages: Number of stages.
        first: Number of layers of the first stage; None gives it an even share.
        last: Number of layers of the last stage; None gives it an even share.
        count_embedding: Whether the embedding counts as one layer of the first stage.
        count_loss: Whether the head and the loss count as one layer of the last stage.

    Returns:
        The range of layers of each stage; together they are `range(num_layers)`.

    Raises:
        ValueError: `stages` is below 1, a stage would have no layer, the given numbers do not fit,
            or an end is both given and counted.

    Example:
        >>> split_layers(10, 4)
        [range(0, 2), range(2, 5), range(5, 8), range(8, 10)]
        >>> split_layers(10, 3, first=2, last=2)
        [range(0, 2), range(2, 8), range(8, 10)]
    """
    require_positive("stages", stages)
    if num_layers > LARGEST:
        raise ValueError(f"num_layers is {num_layers:,}: expected at most {LARGEST:,}")
    if num_layers < stages:
        raise ValueError(
            f"{num_layers} layers cannot fill {stages} pipeline stages: every stage needs a layer, "
            f"so use at most {max(num_layers, 1)} stages or at least {stages} layers"
        )
    for what, given, counted in (("first", first, count_embedding), ("last", last, count_loss)):
        if given is not None and counted:
            raise ValueError(f"{what} is {given} and its other work is counted too: give one")
        if given is not None and given < 1:
            raise ValueError(f"{what} is {given}: expected at least 1 layer")
    head, tail = ([] if given is None else [given] for given in (first, last))
    rest = stages - len(head + tail)
    middle = num_layers - sum(head + tail) + count_embedding + count_loss
    if rest < 0 or middle < rest or (rest == 0 and middle):
        raise ValueError(
            f"{num_layers} layers do not fit {stages} stages with first={first}, last={last}: "
            f"{max(rest, 0)} other stages would share {middle} layers"
        )
    each, remainder = divmod(middle, rest or 1)
    favoured = [*range(1, rest - 1), 0][:remainder]
    lengths = [*head, *(each + (stage in favoured) for stage in range(rest)), *tail]
    lengths[0] -= count_embedding
    lengths[-1] -= count_loss
    if min(lengths) < 1:
        raise ValueError(
            f"{num_layers} layers cannot fill {stages} stages when the embedding or the loss "
            f"counts as a layer: a stage would have none; use fewer stages, or do not count it"
        )
    ends = itertools.accumulate(lengths, initial=0)
    return [range(start, stop) for start, stop in itertools.pairwise(ends)]


def balance_layers(
    costs: Sequence[float], stages: int, *, embedding: float = 0.0, loss: float = 0.0
) -> list[range]:
    """Cut a list of layers into contiguous stages, minimizing the cost of the costliest stage.

    Sums are exact, so layers of equal costs are cut in the same way, whatever the cost.

    Args:
        costs: Cost of each layer, measured or estimated, in any unit, such as its time.
        stages: Number of stages; every stage has at least one layer.
        embedding: Cost of the embedding, on the first stage.
        loss: Cost of the head and the loss, on the last stage.

    Returns:
        The range of layers of each stage. Among equally good cuts, the one whose later stages have
        fewer layers.

    Raises:
        ValueError: There are fewer layers than stages, or a cost is negative or not finite.

    Example:
        >>> balance_layers([1.0] * 10, 4, loss=2.0)
        [range(0, 3), range(3, 6), range(6, 9), range(9, 10)]
    """
    split_layers(len(costs), stages)  # raises if the sizes do not fit
    if not all(0 <= cost < math.inf for cost in (*costs, embedding, loss)):
        raise ValueError("costs are numbers of 0 or more, one for each layer")
    first, last, *layers = _whole((embedding, loss, *costs))
    sums = list(itertools.accumulate(layers, initial=0))

    def cost(start: int, stop: int) -> int:
        ends = (first if start == 0 else 0) + (last if stop == len(costs) else 0)
        return sums[stop] - sums[start] + ends

    # best[stop]: for the layers before `stop`, the cost of the costliest stage and the start of
    # the last stage.
    best = {stop: (cost(0, stop), 0) for stop in range(1, len(costs) + 1)}
    begins = [best]
    for stage in range(2, stages + 1):
        best = {
            stop: min(
                (max(best[start][0], cost(start, stop)), -start) for start in range(stage - 1, stop)
            )
            for stop in range(stage, len(costs) + 1)
        }
        best = {stop: (dearest, -start) for stop, (dearest, start) in best.items()}
        begins.append(best)
    result: list[range] = []
    stop = len(costs)
    for best in reversed(begins):
        result.append(range(best[stop][1], stop))
        stop = best[stop][1]
    return result[::-1]


def _whole(numbers: Sequence[float]) -> list[int]:
    """Return the numbers as whole multiples of a common unit."""
    from fractions import Fraction  # with decimal, for this alone

    exact = [Fraction(float(number)) for number in numbers]
    unit = math.lcm(*(number.denominator for number in exact))
    return [int(number * unit) for number in exact]


def place_stages(ranks: int, chunks: int = 1, *, v_shape: bool = False) -> tuple[int, ...]:
    """Return the rank of each stage, for `Schedule.stage_ranks`.

    Args:
        ranks: Number of pipeline ranks.
        chunks: Number of stages on each rank.
        v_shape: Whether data turns around at the last rank instead of going on at the first one.
            Stage s of 2p is then on rank `min(s, 2p - 1 - s)`, so that neighbouring stages are on
            neighbouring ranks or on the same rank, and the first and last stage on rank 0.

    Example:
        >>> place_stages(3, 2)
        (0, 1, 2, 0, 1, 2)
        >>> place_stages(3, 2, v_shape=True)
        (0, 1, 2, 2, 1, 0)
    """
    way = range(require_positive("ranks", ranks))
    require_positive("ranks times chunks", ranks * require_positive("chunks", chunks))
    return tuple(
        rank
        for chunk in range(chunks)
        for rank in (reversed(way) if v_shape and chunk % 2 else way)
    )
