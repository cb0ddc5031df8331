"""Small samples of large grids that contain every pair of settings."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

_TRIES = 40  # rows drawn for each row taken
_PATIENCE = 400  # rows drawn for a pair before it counts as impossible


def pairwise(
    factors: Mapping[str, Sequence[Any]],
    *,
    allowed: Callable[[dict[str, Any]], bool] | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Draw rows of a grid until each pair of values of two factors is in a row.

    A defect caused by two settings together is found by far fewer rows than the whole grid: about
    the product of the two longest factors. The same arguments give the same rows.

    Args:
        factors: The values of each factor, at least one.
        allowed: Function that tells whether a row is possible; pairs without a possible row are
            left out.
        seed: Seed of the draw.

    Raises:
        ValueError: A factor has no values, or no row is allowed.

    Example:
        >>> rows = pairwise({"dp": (1, 2, 4), "tied": (False, True), "overlap": (False, True)})
        >>> len(rows) < 12, {(row["dp"], row["overlap"]) for row in rows} == {
        ...     (dp, overlap) for dp in (1, 2, 4) for overlap in (False, True)
        ... }
        (True, True)
    """
    if not factors or not all(len(values) for values in factors.values()):
        raise ValueError(f"each factor needs a value, got {dict(factors)!r:.100}")
    may = allowed or (lambda row: True)
    draw = random.Random(seed)  # noqa: S311 - a sample of tests, no secret
    names = list(factors)
    numbers = {name: range(len(factors[name])) for name in names}
    missing = {
        (a, i, b, j) for a, b in combinations(names, 2) for i in numbers[a] for j in numbers[b]
    }

    def row_with(fixed: dict[str, int]) -> dict[str, int] | None:
        for _ in range(_PATIENCE):
            row = {name: draw.choice(numbers[name]) for name in names} | fixed
            if may(_values(factors, row)):
                return row
        return None

    rows: list[dict[str, int]] = []
    while missing:
        a, i, b, j = draw.choice(sorted(missing))
        drawn = [row_with({a: i, b: j})]
        if drawn[0] is None:
            missing.discard((a, i, b, j))
            continue
        drawn += [row_with({a: i, b: j}) for _ in range(_TRIES - 1)]
        best = max((row for row in drawn if row), key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(best)
        rows.append(best)
    if not rows:
        only = row_with({})
        if only is None:
            raise ValueError("allowed() refuses all rows that were drawn; allow some")
        rows.append(only)
    return [_values(factors, row) for row in rows]


def _pairs(row: Mapping[str, int]) -> set[tuple[str, int, str, int]]:
    return {(a, row[a], b, row[b]) for a, b in combinations(row, 2)}


def _values(factors: Mapping[str, Sequence[Any]], row: Mapping[str, int]) -> dict[str, Any]:
    return {name: factors[name][number] for name, number in row.items()}
