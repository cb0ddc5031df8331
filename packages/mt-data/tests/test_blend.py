"""Blending: golden choices, shares, wrapping."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_data import BlendedDataset, DataError, GPTDataset, SplitOrder
from mt_data.datasets.blend import BLOCK, BlendOrder


class Counted:
    """A dataset whose sample i is [name, i]."""

    def __init__(self, name, size):
        self.name, self.size, self.fingerprint = name, size, f"{name}/{size}"

    def __len__(self):
        return self.size

    def sample(self, index):
        assert index >= 0
        return np.array([self.name, index])

    def __getitem__(self, index):
        assert 0 <= index < self.size
        return self.sample(index)


@pytest.mark.parametrize(
    ("weights", "chosen"),
    [
        ([0.5, 0.3, 0.2], [0, 1, 2, 0, 1, 0, 2, 0, 1, 0]),
        ([5, 3, 2], [0, 1, 2, 0, 1, 0, 2, 0, 1, 0]),
        ([0.7, 0.3], [0, 1, 0, 0, 1, 0, 0, 1, 0, 0]),
        ([1], [0] * 10),
    ],
)
def test_choices_equal_the_golden_ones(weights, chosen):
    order = BlendOrder(weights)
    expected = [(d, chosen[:i].count(d)) for i, d in enumerate(chosen)]
    assert [order(i) for i in range(10)] == expected


def reference(weights, size):
    total = float(np.asarray(weights, np.float64).sum())
    shares = [w / total for w in weights]
    taken, chosen = [0] * len(weights), []
    for t in range(size):
        errors = [w * max(t, 1) - n for w, n in zip(shares, taken, strict=True)]
        best = errors.index(max(errors))
        chosen.append((best, taken[best]))
        taken[best] += 1
    return chosen


@settings(max_examples=50, deadline=None)
@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    size=st.integers(1, 300),
)
def test_choices_follow_the_rule_and_keep_the_shares(weights, size):
    order = BlendOrder(weights)
    chosen = [order(i) for i in range(size)]
    assert chosen == reference(weights, size)
    taken = np.bincount([d for d, _ in chosen], minlength=len(weights))
    assert np.abs(taken - order.weights * size).max() < len(weights)
    for dataset in range(len(weights)):
        assert [s for d, s in chosen if d == dataset] == list(range(taken[dataset]))


@pytest.mark.parametrize("size", [0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 3])
def test_counts_are_those_of_the_choices_before(size):
    order = BlendOrder([0.7, 0.2, 0.1])
    taken = np.zeros(3, np.int64)
    for index in range(size):
        taken[order(index)[0]] += 1
    assert BlendOrder([0.7, 0.2, 0.1]).counts(size).tolist() == taken.tolist()


def test_any_sample_can_be_asked_for_first():
    order = BlendOrder([0.6, 0.4])
    far = order(2 * BLOCK + 5)
    assert far == reference([0.6, 0.4], 2 * BLOCK + 6)[-1]
    assert order(BLOCK - 1) == BlendOrder([0.6, 0.4])(BLOCK - 1)


def test_overdrawn_dataset_goes_on_with_another_epoch():
    class Tokens:
        dtype = np.dtype("u2")
        fingerprint = "tokens"
        lengths = np.array([9, 12], np.int32)

        def read(self, index, offset=0, length=None):
            return np.arange(100 * index + offset, 100 * index + offset + length)

    small = GPTDataset(Tokens(), sequence_length=4, seed=5)
    blend = BlendedDataset([small, Counted(7, 1000)], [0.5, 0.5], 60)
    drawn = [blend[i].tolist() for i in range(60) if blend.origin(i)[0] == 0]
    n = len(small)
    assert len(drawn) > 3 * n
    assert drawn == [small.sample(i).tolist() for i in range(len(drawn))]
    assert drawn[:n] != drawn[n : 2 * n]


def test_fingerprint_covers_datasets_and_weights():
    def make(size, weights):
        return BlendedDataset([Counted(0, size), Counted(1, 9)], weights, 10).fingerprint

    prints = {make(5, [1, 1]), make(6, [1, 1]), make(5, [1, 2])}
    assert len(prints) == 3
    assert make(5, [2, 2]) == make(5, [1, 1])


@pytest.mark.parametrize(
    ("weights", "num_samples", "message"),
    [
        ([1.0], 5, "1 weights for 2 datasets"),
        ([1.0, 0.0], 5, "weight 1 is 0.0; weights must be finite and above 0"),
        ([-1.0, 1.0], 5, "weight 0 is -1.0"),
        ([1.0, float("nan")], 5, "weight 1 is nan"),
        ([1.0, 1.0], 0, "num_samples is 0"),
    ],
)
def test_impossible_blends_say_why(weights, num_samples, message):
    with pytest.raises(DataError, match=message):
        BlendedDataset([Counted(0, 3), Counted(1, 3)], weights, num_samples)


def test_blend_checks_its_range():
    blend = BlendedDataset([Counted(0, 3)], [1.0], 4)
    with pytest.raises(IndexError, match="sample 4 does not exist; the blend has 4"):
        blend[4]
    with pytest.raises(DataError, match="at least one dataset"):
        BlendedDataset([], [], 1)


@settings(max_examples=30, deadline=None)
@given(weights=st.lists(st.floats(1e-6, 100), min_size=1, max_size=40))
def test_a_split_order_takes_each_sample_once_and_keeps_the_shares(weights):
    order, taken = SplitOrder(weights), np.zeros(len(weights), int)
    for index in range(300):
        dataset, number = order(index)
        assert taken[dataset] == number
        taken[dataset] += 1
        assert abs(taken - (index + 1) * order.weights).max() < 1.7
    assert order.counts(300).tolist() == taken.tolist()
    dataset, number = order(10**12)
    assert order.counts(10**12 + 1)[dataset] == number + 1
