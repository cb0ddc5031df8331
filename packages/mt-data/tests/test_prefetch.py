"""Prefetched steps equal plain steps in any order, and ready steps cause no wait."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_data import BatchSampler, DataError, Prefetcher, count_labels


class Numbers:
    """Sample i holds i, i + 1, ..."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return np.arange(index, index + 5)


def sampler():
    return BatchSampler(Numbers(), global_batch_size=4, micro_batch_size=2)


def first_ids(batches):
    return [int(batch["sample_ids"][0]) for batch in batches]


@settings(max_examples=50, deadline=None)
@given(steps=st.lists(st.integers(0, 9), max_size=15), depth=st.integers(1, 4))
def test_any_order_of_steps_gives_those_steps(steps, depth):
    plain = sampler()
    with Prefetcher(sampler(), first_ids, depth=depth) as prefetcher:
        for step in steps:
            assert prefetcher.step(step) == first_ids(plain.step(step))


def test_next_steps_are_ready_before_they_are_asked_for():
    prepared, enough = [], threading.Event()

    def prepare(batches):
        prepared.append(first_ids(batches)[0] // 4)
        if len(prepared) == 3:
            enough.set()
        return batches

    with Prefetcher(sampler(), prepare, depth=2) as prefetcher:
        prefetcher.step(0)
        assert enough.wait(10)
        time.sleep(0.05)
        assert prepared == [0, 1, 2]  # and no more than asked to keep
        assert threading.get_ident() not in prepared
        assert first_ids(prefetcher.step(1)) == [4, 6]


def test_preparation_runs_on_another_thread():
    with Prefetcher(sampler(), lambda _: threading.get_ident()) as prefetcher:
        assert prefetcher.step(0) != threading.get_ident()


def test_errors_are_raised_where_the_step_is_asked_for():
    def prepare(batches):
        if first_ids(batches)[0] == 8:
            raise OSError("disk gone")
        return batches

    with Prefetcher(sampler(), prepare) as prefetcher:
        prefetcher.step(0)
        prefetcher.step(1)
        with pytest.raises(OSError, match="disk gone"):
            prefetcher.step(2)
        assert first_ids(prefetcher.step(3)) == [12, 14]
        with pytest.raises(IndexError, match="step 10 needs samples"):
            prefetcher.step(10)
        assert first_ids(prefetcher.step(9)) == [36, 38]


def test_closing_ends_the_thread():
    before = threading.active_count()
    prefetcher = Prefetcher(sampler(), first_ids)
    prefetcher.step(0)
    assert threading.active_count() == before + 1
    prefetcher.close()
    prefetcher.close()
    assert threading.active_count() == before
    with pytest.raises(DataError, match="closed"):
        prefetcher.step(1)
    Prefetcher(sampler(), first_ids).close()
    with pytest.raises(DataError, match="depth is 0"):
        Prefetcher(sampler(), first_ids, depth=0)


def test_labels_are_counted():
    batches = sampler().step(0)
    assert count_labels(batches) == 16
    batches[0]["labels"][0, :3] = -100
    assert count_labels(batches) == 13
