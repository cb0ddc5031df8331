"""The switch between layers and those who run their weight gradients later."""

from __future__ import annotations

import pytest
from mt_parallel_state import WgradStore


def test_what_is_collected_runs_once_oldest_first() -> None:
    store, done = WgradStore(), []
    for name in "ab":
        with store.deferring() as compute:
            assert store.active
            for number in (1, 2):
                store.put(lambda name=name, number=number: done.append(f"{name}{number}"))
        assert not store.active
        if name == "a":
            first = compute
    assert done == []
    compute()
    first()
    first()
    assert done == ["b1", "b2", "a1", "a2"]


def test_a_store_that_is_not_collecting_refuses() -> None:
    store = WgradStore()
    with pytest.raises(RuntimeError, match=r"put\(\) outside of WgradStore.deferring\(\)"):
        store.put(lambda: None)
    with store.deferring(), pytest.raises(RuntimeError, match="inside itself"):
        store.deferring().__enter__()


def test_a_failed_block_is_left() -> None:
    store = WgradStore()
    with pytest.raises(ZeroDivisionError), store.deferring():
        1 / 0  # noqa: B018 - to fail
    assert not store.active
