"""Which rank answers for a part of a parameter that several ranks hold."""

from __future__ import annotations

from collections.abc import Sequence

from mt_files import check_type

from mt_parallel_state.layout import DENSE, EXPERT, ParallelLayout
from mt_parallel_state.sharding import ParamSharding


def is_owner(
    sharding: ParamSharding,
    layout: ParallelLayout,
    rank: int,
    *,
    peers: Sequence[int] = (),
    replica: int = 0,
) -> bool:
    """Whether `rank` is the one that answers for what it holds of a parameter.

    What counts or writes every logical element once asks this: gradient norms, checkpoints. Of the
    ranks that hold the same part, it is the first along every axis that does not split the
    parameter. A copy that another stage owns has no owner here. Pipeline stages hold different
    parameters.

    Args:
        sharding: The parameter's record.
        layout: The layout of the ranks.
        rank: A rank that holds the parameter.
        peers: Ranks, including `rank`, that split the parameter further than its record says
            (ZeRO); each holds a different part.
        replica: The rank's index among copies of the group of peers (hybrid sharding), which the
            axes of the layout do not show.

    Example:
        >>> [is_owner(ParamSharding(), ParallelLayout(tp=2, dp=2), rank) for rank in range(4)]
        [True, False, False, False]
        >>> layout = ParallelLayout(tp=2, dp=2)
        >>> [is_owner(ParamSharding(), layout, r, peers=(r % 2, r % 2 + 2)) for r in range(4)]
        [True, False, True, False]
    """
    check_type("sharding", sharding, ParamSharding)
    check_type("layout", layout, ParallelLayout)
    if sharding.is_copy or replica:
        return False
    own = layout.coordinates(rank)
    others = [layout.coordinates(peer) for peer in peers]
    axes = sharding.spec.axes
    return all(
        own[axis] == 0 or any(other[axis] != own[axis] for other in others)
        for axis in (EXPERT if axes & EXPERT else DENSE)
        if axis not in axes
    )
