"""Best fit: each length once, in nearly full rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mt_data import DataError, best_fit


@given(st.lists(st.integers(1, 50), max_size=80), st.integers(50, 60))
def test_best_fit_takes_each_once_and_fills_rows(lengths, size):
    rows = best_fit(np.array(lengths, np.int64), size)
    assert sorted(n for row in rows for n in row) == list(range(len(lengths)))
    filled = [sum(lengths[n] for n in row) for row in rows]
    assert all(0 < each <= size for each in filled)
    if len(rows) > 1:  # best fit leaves at most one row half empty
        assert sum(each <= size / 2 for each in filled) <= 1


@pytest.mark.parametrize(("mean", "sigma", "least"), [(650, 0.8, 0.995), (1900, 0.6, 0.99)])
def test_rows_are_nearly_full(mean, sigma, least):
    drawn = np.random.default_rng(0).normal(np.log(mean) - sigma**2 / 2, sigma, 8 * 4096)
    lengths = np.clip(np.exp(drawn), 1, 4096).astype(np.int64)
    rows = sum(len(best_fit(part, 4096)) for part in np.split(lengths, 8))
    assert lengths.sum() / (4096 * rows) > least


def test_lengths_that_fit_no_row_are_refused():
    with pytest.raises(DataError, match="item 1 has the length 9"):
        best_fit([1, 9], 8)
    with pytest.raises(DataError, match="integers"):
        best_fit([0.5], 8)
