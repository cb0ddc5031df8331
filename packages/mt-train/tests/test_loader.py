"""The next steps are ready on the host when a step begins, and only this rank's tokens in them."""

from __future__ import annotations

import contextlib
import itertools
import threading

import numpy as np
import pytest
import torch
from mt_data import BatchSampler, Rows
from mt_parallel_state import ParallelLayout, ParallelState
from mt_train.data.loader import labels_of, on_host, prefetched, rows_of, to_device

LENGTH = 16


class Samples:
    """A source with samples i, i + 1, ...; it notes the reads of each thread."""

    def __init__(self) -> None:
        self.read: list[tuple[int, int, int | None, bool]] = []

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> np.ndarray:
        return self.sample(index)

    def sample(self, index: int, begin: int = 0, end: int | None = None) -> np.ndarray:
        main = threading.current_thread() is threading.main_thread()
        self.read.append((index, begin, end, main))
        return np.arange(index, index + LENGTH + 1)[begin:end]

    def sample_documents(self, index: int) -> np.ndarray:
        return np.repeat([0, 1], [5, LENGTH - 4])


def sampler(rows: Rows | None = None) -> BatchSampler:
    plain = BatchSampler(Samples(), global_batch_size=4, micro_batch_size=2)
    return plain if rows is None else plain.with_rows(rows)


def read_by(samples: BatchSampler) -> list[tuple[int, int, int | None, bool]]:
    return samples.dataset.read  # type: ignore[attr-defined]


def test_steps_are_read_once_and_ahead_of_their_time_and_none_after_the_last() -> None:
    ahead, plain = sampler(), sampler()
    with prefetched(ahead, torch.device("cpu")) as steps:
        for step in range(3):
            ready = steps.step(step)
            assert sum(map(sum, ready.labels)) == 4 * LENGTH
            for batch, expected in zip(ready.batches, plain.step(step), strict=True):
                assert batch.keys() == expected.keys()
                assert all(np.array_equal(batch[name], expected[name]) for name in batch)
    assert [index for index, *_ in read_by(ahead)] == list(range(12))
    assert not any(main for *_, main in read_by(ahead))


def test_labels_are_counted_as_they_count() -> None:
    with prefetched(sampler(Rows(packing="documents")), torch.device("cpu")) as steps:
        assert sum(map(sum, steps.step(0).labels)) == 4 * (LENGTH - 1)


@pytest.mark.parametrize(
    ("packing", "counts"),
    [("none", [16, 15, 14]), ("documents", [4 + 11, 3 + 10, 2 + 9])],
)
def test_labels_further_on_are_counted_by_the_rank_that_holds_them(packing, counts) -> None:
    halves = ((0, 4), (12, 16)), ((4, 12),)
    names = ("tokens", "tokens_1", "tokens_2")
    for parts in ([None], halves):
        each = [Rows(packing=packing, parts=part) for part in parts]
        found = [
            labels_of(sampler(rows).step(0)[0], sampler(rows).fields, rows, names) for rows in each
        ]
        assert np.sum(found, axis=0).tolist() == [2 * count for count in counts]
    with prefetched(sampler(each[0]), torch.device("cpu"), counts=names) as steps:
        assert steps.step(0).labels[1] == found[0]


@pytest.mark.parametrize("packing", ["none", "documents"])
def test_ranks_of_a_context_group_read_their_own_tokens(ranks, packing) -> None:
    def body() -> tuple[Rows, dict[str, np.ndarray], int]:
        state = ParallelState(ParallelLayout(cp=2))
        rows = rows_of(state, LENGTH, Rows(packing=packing), ("first", "last"))
        own = sampler(rows)
        (batch, _) = own.step(0)
        return rows, dict(batch), sum((end or 0) - begin for _, begin, end, _ in read_by(own))

    (whole, _) = sampler(Rows(packing=packing)).step(0)
    results = ranks(2, body)
    assert [rows.parts for rows, _, _ in results] == [((0, 4), (12, 16)), ((4, 8), (8, 12))]
    for rows, batch, read in results:
        columns = np.concatenate([np.arange(*part) for part in rows.parts])
        for name in {"tokens", "labels", "positions"} & whole.keys():
            assert np.array_equal(batch[name], whole[name][:, columns])
        assert read == 4 * (LENGTH // 2 + 2)  # and the label of the last token of each part


def test_ranks_that_need_no_tokens_read_none() -> None:
    state = ParallelState(ParallelLayout())
    rows = rows_of(state, LENGTH, Rows(packing="documents"), ("middle",))
    unread = sampler(rows)
    with prefetched(unread, torch.device("cpu")) as steps:
        assert sum(map(sum, steps.step(0).labels)) == 4 * (LENGTH - 1)
    assert not read_by(unread)


def test_batches_are_pinned_on_the_thread_for_their_device(monkeypatch) -> None:
    pinned: list[tuple[int | None, str]] = []
    copied: list[tuple[torch.device, bool]] = []
    current: list[int | None] = [None]

    @contextlib.contextmanager
    def device(which: torch.device):
        current[0] = which.index
        yield
        current[0] = None

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append((current[0], threading.current_thread().name))
        return tensor

    def to(tensor: torch.Tensor, device: torch.device, *, non_blocking: bool) -> torch.Tensor:
        copied.append((device, non_blocking))
        return tensor

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    card = torch.device("cuda", 3)
    with prefetched(sampler(), card) as steps:
        batches = steps.step(2).batches
        assert {(index, name.split("_")[0]) for index, name in pinned} == {(3, "mt-data prefetch")}
        assert len(pinned) == 2 * 3
    assert not copied
    to_device(batches, card)
    assert copied == [(card, True)] * 6
    pinned.clear()
    on_host(sampler().step(0), torch.device("cpu"))
    assert not pinned


def test_an_error_of_the_thread_is_raised_at_its_step() -> None:
    class Broken(Samples):
        def sample(self, index: int, begin: int = 0, end: int | None = None) -> np.ndarray:
            if index == 5:
                raise OSError("a bad disk")
            return super().sample(index, begin, end)

    broken = BatchSampler(Broken(), global_batch_size=4, micro_batch_size=2)
    with prefetched(broken, torch.device("cpu")) as steps:
        assert len(steps.step(0).batches) == 2
        with pytest.raises(OSError, match="a bad disk"):
            steps.step(1)


def test_all_parts_of_a_context_group_make_the_row() -> None:
    for size in (2, 4):
        found = itertools.chain.from_iterable(
            rows_of(_Place(size, rank), LENGTH, Rows(), ("first",)).parts or ()  # type: ignore[arg-type]
            for rank in range(size)
        )
        places = sorted(place for part in found for place in range(*part))
        assert places == list(range(LENGTH))


class _Place:
    """A rank's place in a context group, without a process."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self, axis: str) -> int:
        return self._size

    def index(self, axis: str) -> int:
        return self._rank
