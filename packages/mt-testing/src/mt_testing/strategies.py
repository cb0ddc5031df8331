"""Hypothesis strategies for parallel layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("ep", "etp")
_MOST_RANKS = 1 << 20


def layouts(
    max_world: int = 64,
    axes: Sequence[str] = ("tp", "cp", "ep", "dp", "pp"),
    *,
    world: int | None = None,
) -> SearchStrategy[dict[str, int]]:
    """Draw axis sizes of a parallel layout, such as `{"tp": 2, "ep": 2, "dp": 2}`.

    The world is the product of tp, cp, dp and pp. `ep` and `etp` factor the same ranks again for
    expert layers, so `ep * etp` divides `tp * cp * dp`. Shrinks to all ones.

    Args:
        max_world: Largest world.
        axes: Axes to draw, out of tp, cp, dp, pp, ep and etp; the dict has exactly these keys.
        world: Draw factorisations of exactly this world (needs "dp" among the axes, which takes
            the remaining factor).

    Raises:
        ValueError: Unknown or repeated axes, or an impossible world.
    """
    from hypothesis import strategies as st

    _validate(max_world, axes, world)
    dense_axes = [axis for axis in axes if axis in DENSE_AXES]

    @st.composite
    def draw_layout(draw: st.DrawFn) -> dict[str, int]:
        sizes: dict[str, int] = dict.fromkeys(DENSE_AXES, 1)
        left = world or max_world
        free = [axis for axis in dense_axes if world is None or axis != "dp"]
        for axis in draw(st.permutations(free)):
            sizes[axis] = draw(
                st.integers(1, left) if world is None else st.sampled_from(_divisors(left))
            )
            left //= sizes[axis]
        if world is not None:
            sizes["dp"] = left
        experts = sizes["tp"] * sizes["cp"] * sizes["dp"]
        most = len(_divisors(world or max_world))
        for axis in EXPERT_AXES:
            if axis in axes:
                # An index beyond the last divisor means the last one, so that the axis stays above
                # one in a smaller world, and shrinking does not get stuck at a large world.
                divisors = _divisors(experts)
                place = draw(st.integers(0, most - 1))
                sizes[axis] = divisors[min(place, len(divisors) - 1)]
                experts //= sizes[axis]
        return {axis: sizes[axis] for axis in axes}

    return draw_layout()


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _validate(max_world: int, axes: Sequence[str], world: int | None) -> None:
    known = (*DENSE_AXES, *EXPERT_AXES)
    unknown = [axis for axis in axes if axis not in known]
    if unknown:
        raise ValueError(f"unknown axes {unknown}; use {', '.join(known)}")
    if len(set(axes)) != len(axes):
        raise ValueError(f"axes {list(axes)} repeat a name")
    for name, value in (("max_world", max_world), ("world", 1 if world is None else world)):
        if type(value) is not int:
            raise TypeError(f"{name} must be an int, got {value!r}")
        if not 1 <= value <= _MOST_RANKS:
            raise ValueError(f"{name} is {value}; it must be 1 to {_MOST_RANKS}")
    if world is not None and "dp" not in axes:
        raise ValueError(f'world={world} needs "dp" among the axes {list(axes)}')
