"""Exact search agrees with a comparison of all pairs in fp64, also at equal distances."""

import numpy as np
import pytest
from mt_data import DataError
from mt_retro import exact_neighbours


def brute_force(queries, keys, k, excluded=None):
    """Ids and distances of the k nearest in fp64, equal distances by id."""
    ids = np.full((len(queries), k), -1)
    distances = np.full((len(queries), k), np.inf)
    for row, query in enumerate(queries.astype(np.float64)):
        far = ((keys.astype(np.float64) - query) ** 2).sum(axis=1)
        if excluded is not None:
            far[slice(*excluded[row])] = np.inf
        order = [key for key in np.argsort(far, kind="stable")[:k] if far[key] < np.inf]
        ids[row, : len(order)], distances[row, : len(order)] = order, far[order]
    return ids, distances


def drawn(kind, draw, count, dim=24):
    values = draw.standard_normal((count, dim))
    if kind == "equal":  # few distinct vectors, each many times
        values = values[draw.integers(0, max(count // 50, 1), count)]
    elif kind == "all equal":
        values[:] = values[:1]
    elif kind == "grid":  # different vectors at equal distances
        values = draw.integers(-1, 2, (count, dim)).astype(np.float64)
    elif kind == "near":  # differences below fp32's rounding
        values = values[:1] + 1e-9 * values
    elif kind == "scales":  # lengths from 1e-18 to 1e18
        values *= 10.0 ** draw.integers(-18, 18, (count, 1))
    elif kind == "tiny":
        values *= 1e-25
    return values


KINDS = ["normal", "equal", "all equal", "grid", "near", "scales", "tiny"]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_are_those_of_fp64(kind, dtype, monkeypatch):
    monkeypatch.setattr("mt_retro.exact.BLOCK", 100)
    monkeypatch.setattr("mt_retro.exact.SLAB", 16)
    draw = np.random.default_rng(1)
    with np.errstate(over="ignore", under="ignore"):
        keys = drawn(kind, draw, 550).astype(dtype)
        queries = np.concatenate([drawn(kind, draw, 20).astype(dtype), keys[::25]])
    keys, queries = (np.where(np.isfinite(each), each, 1) for each in (keys, queries))
    excluded = np.sort(draw.integers(0, 551, (len(queries), 2)), axis=1)
    for k in (1, 7, 120):
        for ranges in (None, excluded):
            ids, distances = exact_neighbours(queries, keys, k, excluded=ranges)
            expected = brute_force(queries, keys, k, ranges)
            assert ids.tolist() == expected[0].tolist()
            assert distances.tolist() == expected[1].tolist()


def test_blocks_of_the_usual_size_find_the_same():
    draw = np.random.default_rng(2)
    keys = draw.standard_normal((20_000, 32)).astype(np.float32)
    keys[15_000:] = keys[:5_000]
    queries = np.concatenate([keys[:1000:100], keys[14_990:16_100:10]])
    ids, distances = exact_neighbours(queries, keys, 5)
    expected = brute_force(queries, keys, 5)
    assert ids.tolist() == expected[0].tolist()
    assert distances.tolist() == expected[1].tolist()


def test_what_is_missing_is_no_neighbour():
    ids, distances = exact_neighbours(np.ones((2, 3)), np.zeros((2, 3)), 4)
    assert ids.tolist() == [[0, 1, -1, -1]] * 2
    assert distances.tolist() == [[3, 3, np.inf, np.inf]] * 2
    assert exact_neighbours(np.ones((2, 3)), np.zeros((0, 3)), 1)[0].tolist() == [[-1], [-1]]
    assert exact_neighbours(np.ones((0, 3)), np.zeros((2, 3)), 1)[0].shape == (0, 1)


def test_hashes_that_collide_mix_up_nothing(monkeypatch):
    real = np.einsum
    monkeypatch.setattr(
        np, "einsum", lambda how, *rest, **more: real(how, *rest, **more) * (how != "ij,j->i")
    )
    keys = np.random.default_rng(3).integers(0, 2, (300, 4)).astype(np.float32)
    ids, _ = exact_neighbours(keys, keys, 9)
    assert ids.tolist() == brute_force(keys, keys, 9)[0].tolist()


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e25])
def test_vectors_that_are_no_numbers_are_named(value):
    good, bad = np.zeros((9, 3)), np.zeros((9, 3))
    bad[7, 1] = value
    with pytest.raises(DataError, match="keys: vector 7 has a value that is not finite"):
        exact_neighbours(good, bad, 1)
    with pytest.raises(DataError, match="queries: vector 7 "):
        exact_neighbours(bad, good, 1)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(DataError, match="queries have 3 dims, and keys 4"):
        exact_neighbours(np.zeros((1, 3)), np.zeros((1, 4)), 1)
    with pytest.raises(DataError, match="must be"):
        exact_neighbours(np.zeros(3), np.zeros((1, 3)), 1)
    with pytest.raises(DataError, match="ask for 1 neighbour"):
        exact_neighbours(np.zeros((1, 3)), np.zeros((1, 3)), 0)
