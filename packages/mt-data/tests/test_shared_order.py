"""Orders in files: the same samples, made once, and no damage unseen."""

import random
import threading
import time

import numpy as np
import pytest
from mt_data import DataFileError, GPTDataset, IndexedDataset, IndexedWriter
from mt_data.datasets import gpt
from mt_data.datasets import order as order_module
from mt_data.datasets.order import StableOrder
from mt_data.datasets.permutation import Permutation
from mt_data.datasets.shared_order import OrderFolder
from mt_data.datasets.stream import Stream
from mt_files import FileError

LENGTHS = np.random.default_rng(0).integers(0, 9, 300)


def stream(epoch=0):
    return Stream.shuffled(LENGTHS, Permutation(len(LENGTHS), 7, epoch))


@pytest.fixture
def indexed(tmp_path):
    with IndexedWriter(tmp_path / "data", "uint16") as writer:
        for start, length in enumerate(LENGTHS):
            writer.add_document(np.arange(start, start + length))
    return IndexedDataset(tmp_path / "data")


def test_blocks_change_no_order(monkeypatch):
    whole = stream()
    shuffle = Permutation(len(LENGTHS), 7, 0)(np.arange(len(LENGTHS)))
    np.testing.assert_array_equal(whole.documents, shuffle)
    monkeypatch.setattr("mt_data.datasets.stream._BLOCK", 7)
    np.testing.assert_array_equal(stream().documents, whole.documents)
    np.testing.assert_array_equal(stream().ends, np.cumsum(LENGTHS[shuffle]))


def test_orders_in_files_give_the_same_samples_and_are_made_once(indexed, tmp_path, monkeypatch):
    plain = GPTDataset(indexed, sequence_length=16, seed=3)
    wanted = [plain.sample(index) for index in range(3 * len(plain))]
    monkeypatch.setattr(gpt, "SHARED_FROM", 1)
    orders = tmp_path / "orders"

    def samples():
        dataset = GPTDataset(indexed, sequence_length=16, seed=3, order_folder=orders)
        for index, expected in enumerate(wanted):
            np.testing.assert_array_equal(dataset.sample(index), expected)

    samples()
    deadline = time.monotonic() + 60
    while (files := sorted(path.stem[-1] for path in orders.glob("*.order"))) != ["2", "3"]:
        assert time.monotonic() < deadline, files  # a thread makes the next epoch's
    made = []
    monkeypatch.setattr(Stream, "shuffled", lambda *_: made.append(1))
    again = GPTDataset(indexed, sequence_length=16, seed=3, order_folder=orders)
    np.testing.assert_array_equal(again.sample(2 * len(plain)), wanted[2 * len(plain)])
    assert not made


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_next_epoch_is_ready_before_it_begins(indexed, tmp_path, monkeypatch, is_shared):
    monkeypatch.setattr(gpt, "SHARED_FROM", 1 if is_shared else 1000)
    monkeypatch.setattr(order_module, "_AHEAD_FROM", 1)
    dataset = GPTDataset(indexed, sequence_length=16, seed=3, order_folder=tmp_path / "orders")
    count, asked = len(dataset), []
    expected = GPTDataset(indexed, sequence_length=16, seed=3).sample(count)
    make = StableOrder._stream
    monkeypatch.setattr(
        StableOrder, "_stream", lambda self, epoch: asked.append(epoch) or make(self, epoch)
    )
    dataset.sample(count // 2 + 1)
    deadline = time.monotonic() + 60
    while not dataset._order._ready:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    np.testing.assert_array_equal(dataset.sample(count), expected)
    assert asked == [0, 1]  # the thread's


def test_one_of_many_makes_a_file_and_the_others_wait(tmp_path):
    made = []

    def make():
        made.append(1)
        time.sleep(0.1)
        return stream()

    def ask():
        found = OrderFolder(tmp_path, "a" * 64).stream(0, make)
        np.testing.assert_array_equal(found.documents, stream().documents)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert made == [1]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="cannot make it"):
        OrderFolder(tmp_path / "file" / "orders", "a" * 64)


def test_damage_is_named(tmp_path):
    folder = OrderFolder(tmp_path, "a" * 64)
    folder.stream(0, stream)
    (path,) = tmp_path.glob("*.order")
    whole, rng = path.read_bytes(), random.Random(0)
    spoilt = [b"", whole[:-1], whole + b"\0", whole[:40]]
    for bit in rng.sample(range(64 * 8), 100) + rng.sample(range(64 * 8, len(whole) * 8), 200):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        spoilt.append(bytes(flipped))
    for content in spoilt:
        path.write_bytes(content)
        with pytest.raises(DataFileError, match=path.name):
            folder.stream(0, stream)
    path.write_bytes(whole)
    path.rename(tmp_path / path.name.replace("a", "b"))  # the order of other data
    with pytest.raises(DataFileError):
        OrderFolder(tmp_path, "b" * 64).stream(0, stream)
