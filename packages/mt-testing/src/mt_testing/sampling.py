"""Rows of which CI runs a sample, and a campaign all."""

from collections.abc import Callable, Iterable

import pytest


def sample(
    rows: Iterable[tuple[object, ...]], *, every: int, name: Callable[..., str] | None = None
) -> list[object]:
    """Return the rows as parameters, all but every so many marked for the campaign.

    With `every` prime to the number of rows of a kind, and below it, each kind has one in CI, and
    their places in the kinds differ. `name` gives the id of a row.
    """
    marks = [pytest.mark.campaign]
    return [
        pytest.param(
            *row, marks=marks if index % every else [], id=None if name is None else name(*row)
        )
        for index, row in enumerate(rows)
    ]
