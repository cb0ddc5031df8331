"""Rows of which CI runs a sample, and a campaign all."""

from collections.abc import Iterable

import pytest


def sample(rows: Iterable[tuple[object, ...]], *, every: int) -> list[object]:
    """Return the rows as parameters, all but every so many marked for the campaign.

    With `every` prime to the number of rows of a kind, and below it, each kind has one in CI, and
    their places in the kinds differ.
    """
    marks = [pytest.mark.campaign]
    return [
        pytest.param(*row, marks=marks if index % every else []) for index, row in enumerate(rows)
    ]
