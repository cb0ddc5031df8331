"""Groups cut into levels: instances, hierarchical and dynamic context parallelism."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mt_parallel_state import ParallelLayout, cut_into_levels


def test_hierarchical_levels_match_megatron_goldens() -> None:
    first, second, third = cut_into_levels(range(16), (2, 2, 4))
    assert first[:2] == [[0, 1], [2, 3]]
    assert second[:2] == [[0, 2], [1, 3]]
    assert third == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 7))
def test_each_level_varies_one_digit_of_the_position(sizes: list[int], start: int) -> None:
    ranks = [start + 3 * i for i in range(prod(sizes))]

    def digits(position: int) -> list[int]:
        found = []
        for size in sizes:
            found.append(position % size)
            position //= size
        return found

    for i, level in enumerate(cut_into_levels(ranks, sizes)):
        expected: dict[tuple[int, ...], list[int]] = {}
        for position, rank in enumerate(ranks):
            others = digits(position)
            others[i] = -1
            expected.setdefault(tuple(others), []).append(rank)
        assert sorted(level) == sorted(expected.values())


def test_data_parallel_instances_are_two_levels() -> None:
    groups = ParallelLayout(tp=2, dp=4).groups("dp")
    assert [cut_into_levels(group, (2, 2)) for group in groups] == [
        [[[0, 2], [4, 6]], [[0, 4], [2, 6]]],
        [[[1, 3], [5, 7]], [[1, 5], [3, 7]]],
    ]


def test_levels_that_do_not_multiply_to_the_group_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\) multiply to 6, but the group has 8 ranks"):
        cut_into_levels(range(8), (2, 3))
