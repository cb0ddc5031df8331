from itertools import combinations, product

import pytest
from mt_testing import pairwise

FACTORS = {"dp": (1, 2, 4), "tp": (1, 2), "name": ("a", "b", "c", "d"), "tied": (False, True)}


def pairs_of(rows):
    return {((a, row[a]), (b, row[b])) for row in rows for a, b in combinations(row, 2)}


@pytest.mark.parametrize("seed", range(5))
def test_every_pair_of_values_is_in_a_row_of_far_fewer_than_the_grid(seed):
    grid = [dict(zip(FACTORS, row, strict=True)) for row in product(*FACTORS.values())]
    rows = pairwise(FACTORS, seed=seed)
    assert pairs_of(rows) == pairs_of(grid)
    assert all(row in grid for row in rows)
    assert 12 <= len(rows) <= 18  # 4 x 3 is the least, and the grid has 48


def test_rows_that_can_not_be_are_never_drawn_and_all_other_pairs_are():
    def allowed(row):
        return row["dp"] * row["tp"] <= 4 and not (row["name"] == "d" and row["tied"])

    grid = [dict(zip(FACTORS, row, strict=True)) for row in product(*FACTORS.values())]
    rows = pairwise(FACTORS, allowed=allowed)
    assert all(map(allowed, rows))
    assert pairs_of(rows) == pairs_of([row for row in grid if allowed(row)])


def test_the_rows_are_those_of_the_seed():
    assert pairwise(FACTORS, seed=3) == pairwise(FACTORS, seed=3)
    assert pairwise(FACTORS, seed=3) != pairwise(FACTORS, seed=4)


def test_one_factor_alone_gives_one_row():
    assert pairwise({"dp": (2,)}) == [{"dp": 2}]


def test_what_gives_no_row_is_an_error():
    with pytest.raises(ValueError, match="each factor needs a value"):
        pairwise({"dp": ()})
    with pytest.raises(ValueError, match=r"allowed\(\) refuses all rows"):
        pairwise({"dp": (1, 2)}, allowed=lambda row: False)
