"""A sample of test rows for CI; the campaign runs all rows."""

from collections.abc import Callable, Iterable

import pytest


def sample(
    rows: Iterable[tuple[object, ...]], *, every: int, name: Callable[..., str] | None = None
) -> list[object]:
    """Return the rows as parameters; all except each `every`-th one are marked for the campaign.

    Choose `every` below the number of rows of each kind and coprime to it: then CI runs a row of
    each kind, at different places within the kinds. `name` returns the id of a row.
    """
    marks = [pytest.mark.campaign]
    return [
        pytest.param(
            *row, marks=marks if index % every else [], id=None if name is None else name(*row)
        )
        for index, row in enumerate(rows)
    ]
