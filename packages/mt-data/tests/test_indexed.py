"""`.bin/.idx`: golden bytes, every structural check, damage of any kind, atomic commit."""

import contextlib
import hashlib
import itertools
import json
import mmap
import multiprocessing
import os
import pickle
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_data import DataError, DataFileError, IndexedDataset, IndexedWriter, token_dtype
from mt_data.storage import index as index_module

GOLDEN_BIN = bytes.fromhex("01000200030004000500")
GOLDEN_IDX = (
    bytes.fromhex("4d4d4944494458000001000000000000000802000000000000000300000000000000")
    + struct.pack("<2i", 3, 2)
    + struct.pack("<2q", 0, 6)
    + struct.pack("<3q", 0, 1, 2)
)


@pytest.fixture
def golden(tmp_path):
    prefix = tmp_path / "corpus"
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_document([1, 2, 3])
        writer.add_document([4, 5])
    return prefix


@pytest.fixture
def foreign(tmp_path):
    """The golden pair as another tool leaves it: without our `.json`."""
    prefix = tmp_path / "foreign"
    Path(f"{prefix}.bin").write_bytes(GOLDEN_BIN)
    Path(f"{prefix}.idx").write_bytes(GOLDEN_IDX)
    return prefix


def patched(prefix, offset, form, *values):
    data = bytearray(GOLDEN_IDX)
    struct.pack_into(form, data, offset, *values)
    Path(f"{prefix}.idx").write_bytes(bytes(data))


def test_writer_gives_megatrons_bytes(golden):
    assert Path(f"{golden}.bin").read_bytes() == GOLDEN_BIN
    assert Path(f"{golden}.idx").read_bytes() == GOLDEN_IDX
    assert len(GOLDEN_IDX) == 82


def test_reader_gives_back_what_megatron_wrote(foreign):
    with IndexedDataset(foreign) as dataset:
        assert [dataset[i].tolist() for i in range(len(dataset))] == [[1, 2, 3], [4, 5]]
        assert dataset[-1].tolist() == [4, 5]
        assert dataset.dtype == np.uint16
        assert dataset.num_documents == 2
        assert dataset.read(0, 1, 1).tolist() == [2]
        assert dataset.stream(2, 2).tolist() == [3, 4]
        assert dataset.metadata() is None


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(1, "uint16"), (65_499, "uint16"), (65_500, "int32"), (65_536, "int32"), (200_000, "int32")],
)
def test_token_width_follows_megatrons_rule(vocab_size, dtype):
    assert token_dtype(vocab_size).name == dtype


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "i8", "u2", "f4", "f8"])
def test_every_dtype_round_trips(tmp_path, dtype):
    with IndexedWriter(tmp_path / "x", dtype) as writer:
        writer.add_document(np.array([0, 1, 100], dtype))
        writer.add_document(np.array([], dtype))
    dataset = IndexedDataset(tmp_path / "x")
    assert dataset.dtype == np.dtype(dtype)
    assert dataset[0].tolist() == [0, 1, 100]
    assert dataset[1].tolist() == []
    dataset.verify()


@settings(max_examples=30, deadline=None)
@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 65535), max_size=8), max_size=3), min_size=1, max_size=6
    )
)
def test_documents_of_several_sequences_round_trip(tmp_path_factory, documents):
    prefix = tmp_path_factory.mktemp("round") / "x"
    with IndexedWriter(prefix, np.uint16) as writer:
        for sequences in documents:
            flat = [token for sequence in sequences for token in sequence]
            writer.add_document(np.array(flat, np.int64), [len(s) for s in sequences])
    dataset = IndexedDataset(prefix)
    assert dataset.num_documents == len(documents)
    assert [s.tolist() for s in dataset] == [s for document in documents for s in document]
    for number, sequences in enumerate(documents):
        assert dataset.document(number).tolist() == [t for s in sequences for t in s]
    assert dataset.stream(0, dataset.num_tokens).tolist() == [
        t for document in documents for s in document for t in s
    ]


def test_modes_round_trip_and_are_never_guessed(tmp_path):
    with IndexedWriter(tmp_path / "x", np.int32, multimodal=True) as writer:
        writer.add_sequence([7], mode=0)
        writer.add_sequence([8, 9], mode=1)
        writer.end_document()
    dataset = IndexedDataset(tmp_path / "x", multimodal=True)
    assert dataset.modes is not None
    assert dataset.modes.tolist() == [0, 1]
    with pytest.raises(DataFileError, match="open it with multimodal=True"):
        IndexedDataset(tmp_path / "x")
    with IndexedWriter(tmp_path / "y") as writer:
        writer.add_document([1])
    with pytest.raises(DataFileError, match="open it with multimodal=False"):
        IndexedDataset(tmp_path / "y", multimodal=True)


@pytest.mark.parametrize(
    ("offset", "form", "value", "message"),
    [
        (0, "<B", 0, "offset 0: expected the magic bytes"),
        (9, "<Q", 2, "offset 9: expected version 1, found 2"),
        (17, "<B", 9, "offset 17: expected a token dtype code of 1 to 8, found 9"),
        (17, "<B", 0, "found 0"),
        (18, "<Q", 2**61, "expected 27670116110564327482 bytes"),
        (18, "<Q", 3, "expected 94 bytes for 3 sequences and 3 document boundaries"),
        (26, "<Q", 0, "offset 26: the document index needs at least 1 entry"),
        (26, "<Q", 2**62, "found 82 bytes"),
        (34, "<i", -1, "offset 34: expected a length of 0 or more for sequence 0, found -1"),
        (34, "<i", 2, "offset 50: expected byte pointer 4 for sequence 1, found 6"),
        (42, "<q", 2, "offset 42: expected byte pointer 0 for sequence 0, found 2"),
        (50, "<q", 8, "offset 50: expected byte pointer 6 for sequence 1, found 8"),
        (58, "<q", 1, "offset 58: expected the document index to begin with 0, found 1"),
        (66, "<q", -5, "offset 66: expected a document boundary of at least 0, found -5"),
        (66, "<q", 7, "offset 74: expected a document boundary of at least 7, found 2"),
        (74, "<q", 1, "offset 74: expected the last document boundary to be the sequence count 2"),
    ],
)
def test_wrong_index_field_is_named(foreign, offset, form, value, message):
    patched(foreign, offset, form, value)
    with pytest.raises(DataFileError) as error:
        IndexedDataset(foreign)
    assert message in str(error.value)
    assert error.value.path == f"{foreign}.idx"
    assert str(error.value).startswith(f"{foreign}.idx: ")


def test_length_beyond_the_token_file_is_named(foreign):
    patched(foreign, 38, "<i", 3)
    with pytest.raises(DataFileError, match=r"expected 12 bytes .6 tokens of uint16.*found 10"):
        IndexedDataset(foreign)


@pytest.mark.parametrize("size", [0, 1, 9, 33, 34, 81, 83, 84, 1000])
def test_index_of_another_size_is_refused(foreign, size):
    Path(f"{foreign}.idx").write_bytes(GOLDEN_IDX.ljust(size, b"\0")[:size])
    with pytest.raises(DataFileError, match=f"{size} bytes"):
        IndexedDataset(foreign)


@pytest.mark.parametrize("size", [0, 1, 8, 9, 11, 12])
def test_token_file_of_another_size_is_refused(foreign, size):
    Path(f"{foreign}.bin").write_bytes(GOLDEN_BIN.ljust(size, b"\0")[:size])
    with pytest.raises(DataFileError) as error:
        IndexedDataset(foreign)
    assert str(error.value).startswith(f"{foreign}.bin: expected 10 bytes")
    assert f"found {size} bytes" in str(error.value)
    assert f"offset {min(size, 10)}" in str(error.value)


def test_missing_file_is_named(foreign):
    os.remove(f"{foreign}.bin")
    with pytest.raises(FileNotFoundError, match=r"foreign\.bin"):
        IndexedDataset(foreign)


damage = st.one_of(
    st.tuples(st.just("flip"), st.integers(0, 81), st.integers(1, 255)),
    st.tuples(st.just("cut"), st.integers(0, 81), st.just(0)),
    st.tuples(st.just("grow"), st.integers(1, 64), st.integers(0, 255)),
    st.tuples(st.just("word"), st.integers(0, 74), st.integers(0, 2**64 - 1)),
)


def damaged(data, kind, at, value):
    if kind == "cut":
        return data[:at]
    if kind == "grow":
        return data + bytes([value]) * at
    if kind == "word":
        return data[:at] + struct.pack("<Q", value) + data[at + 8 :]
    return data[:at] + bytes([data[at] ^ value]) + data[at + 1 :]


@settings(max_examples=300, deadline=None)
@given(change=damage)
def test_damaged_index_is_an_error_or_gives_the_same_tokens(tmp_path_factory, change):
    prefix = tmp_path_factory.getbasetemp() / "fuzz"
    Path(f"{prefix}.bin").write_bytes(GOLDEN_BIN)
    Path(f"{prefix}.idx").write_bytes(damaged(GOLDEN_IDX, *change))
    try:
        dataset = IndexedDataset(prefix)
    except DataFileError as error:
        assert str(prefix) in str(error)  # noqa: PT017 - either outcome is fine
        return
    # What remains: another dtype of the same width, another boundary between documents.
    assert dataset.stream(0, dataset.num_tokens).tobytes() == GOLDEN_BIN
    assert [len(dataset[i]) for i in range(len(dataset))] == [3, 2]
    for document in range(dataset.num_documents):
        dataset.document(document)


@settings(max_examples=200, deadline=None)
@given(change=damage)
def test_any_change_of_an_index_with_a_record_is_an_error(tmp_path_factory, change):
    prefix = tmp_path_factory.getbasetemp() / "recorded"
    if not Path(f"{prefix}.json").exists():
        with IndexedWriter(prefix, np.uint16) as writer:
            writer.add_document([1, 2, 3])
            writer.add_document([4, 5])
    changed = damaged(GOLDEN_IDX, *change)
    Path(f"{prefix}.idx").write_bytes(changed)
    if changed == GOLDEN_IDX:
        IndexedDataset(prefix).verify()
        return
    with pytest.raises(DataFileError, match=r"recorded\.idx"):
        IndexedDataset(prefix)


def test_flipped_token_is_found_by_verify_only(golden):
    data = bytearray(GOLDEN_BIN)
    data[4] ^= 1
    Path(f"{golden}.bin").write_bytes(bytes(data))
    dataset = IndexedDataset(golden)
    assert dataset[0].tolist() == [1, 2, 2]
    with pytest.raises(DataFileError, match=r"corpus\.bin: content has changed: expected sha256"):
        dataset.verify()


def test_verify_says_when_there_is_no_record(foreign):
    with pytest.raises(DataFileError, match=r"foreign\.json: not found, so there is no digest"):
        IndexedDataset(foreign).verify()


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, "\xff"])
def test_broken_record_is_named(golden, text):
    Path(f"{golden}.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataFileError, match=r"corpus\.json"):
        IndexedDataset(golden)


def test_token_file_cut_while_open_is_an_error_and_no_signal(golden):
    dataset = IndexedDataset(golden)
    first = dataset[0]
    os.truncate(f"{golden}.bin", 4)
    with pytest.raises(
        DataFileError, match=r"offset 6: expected 4 bytes, read 0; the file was cut"
    ):
        dataset[1]
    assert first.tolist() == [1, 2, 3]


def test_arrays_outlive_the_dataset_and_its_files(golden):
    dataset = IndexedDataset(golden)
    tokens = dataset[0]
    dataset.close()
    for ending in ("bin", "idx"):
        os.remove(f"{golden}.{ending}")
    del dataset
    tokens += 1
    assert tokens.tolist() == [2, 3, 4]


def test_closed_dataset_says_so(golden):
    dataset = IndexedDataset(golden)
    dataset.close()
    dataset.close()
    with pytest.raises(DataError, match="the dataset is closed"):
        dataset[0]


def _read_all(dataset):
    return [dataset[i].tolist() for i in range(len(dataset))]


def test_dataset_travels_to_another_process(golden):
    dataset = IndexedDataset(golden)
    assert _read_all(pickle.loads(pickle.dumps(dataset))) == [[1, 2, 3], [4, 5]]
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        documents = pool.apply(list, (dataset,))
    assert [document.tolist() for document in documents] == [[1, 2, 3], [4, 5]]


@pytest.mark.parametrize("index", [2, -3, 10**12])
def test_index_out_of_range_is_named(golden, index):
    with pytest.raises(IndexError, match=f"sequence {index} does not exist; there are 2"):
        IndexedDataset(golden)[index]


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 4), (4, None), (2, 2), (0, -1)])
def test_read_beyond_a_sequence_is_refused(golden, offset, length):
    with pytest.raises(IndexError, match="it has 3 tokens"):
        IndexedDataset(golden).read(0, offset, length)


@pytest.mark.parametrize("name", ["corpus.bin", "corpus.idx"])
def test_prefix_with_an_ending_says_what_to_pass(tmp_path, name):
    for make in (IndexedDataset, IndexedWriter):
        with pytest.raises(DataError, match=r"pass the prefix '.*corpus'"):
            make(os.fspath(tmp_path / name))


@pytest.mark.parametrize(
    ("dtype", "tokens", "message"),
    [
        (np.uint16, [65_536], "token id 65536 does not fit uint16"),
        (np.uint16, [-1], "token id -1 does not fit uint16"),
        (np.int32, [2**31], "token id 2147483648 does not fit int32"),
        (np.int32, [[1]], "must have one dim"),
        (np.int32, [0.5], "tokens must be integers"),
    ],
)
def test_writer_never_wraps_a_token(tmp_path, dtype, tokens, message):
    with pytest.raises(DataError, match=message), IndexedWriter(tmp_path / "x", dtype) as writer:
        writer.add_document(tokens)
    assert list(tmp_path.iterdir()) == []


def test_writer_checks_documents(tmp_path):
    writer = IndexedWriter(tmp_path / "x")
    with pytest.raises(DataError, match="must be 0 or more and sum to the 3 tokens"):
        writer.add_document([1, 2, 3], [1, 1])
    writer.add_sequence([1])
    with pytest.raises(DataError, match="1 sequences belong to no document; call end_document"):
        writer.finalize()
    with pytest.raises(DataError, match="multimodal=False"):
        writer.add_sequence([1], mode=1)
    writer.discard()
    with pytest.raises(DataError, match="already finalized or discarded"):
        writer.add_sequence([1])
    with pytest.raises(DataError, match="dtype complex128 cannot be stored; choose one of uint8"):
        IndexedWriter(tmp_path / "x", np.complex128)


def test_failed_build_leaves_the_old_dataset(golden):
    with pytest.raises(DataError), IndexedWriter(golden, np.uint16, overwrite=True) as writer:
        writer.add_document([9, -1])
    assert _read_all(IndexedDataset(golden)) == [[1, 2, 3], [4, 5]]
    assert sorted(p.name for p in golden.parent.iterdir()) == [
        "corpus.bin",
        "corpus.idx",
        "corpus.json",
    ]


@pytest.mark.parametrize("crash_at", range(1, 4))
def test_crash_while_committing_never_mixes_two_datasets(golden, monkeypatch, crash_at):
    writer = IndexedWriter(golden, np.uint16, overwrite=True)
    writer.add_document([9, 8, 7])
    writer.add_document([6, 5])
    calls = 0
    rename = os.replace

    def crashing(source, target):
        nonlocal calls
        calls += 1
        if calls == crash_at:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "replace", crashing)
    with pytest.raises(KeyboardInterrupt):
        writer.finalize()
    with pytest.raises(FileNotFoundError, match=r"corpus\.idx"):
        IndexedDataset(golden)


def test_record_has_counts_digests_and_the_callers_values(tmp_path):
    writer = IndexedWriter(tmp_path / "deep" / "er" / "x", np.uint16)
    writer.add_document([1, 2, 3], [2, 1])
    writer.finalize({"source": "test"})
    record = json.loads((tmp_path / "deep/er/x.json").read_text())
    assert (record["sequences"], record["documents"], record["tokens"]) == (2, 1, 3)
    assert record["source"] == "test"
    assert len(record["bin_sha256"]) == len(record["idx_sha256"]) == 64


def test_fingerprint_changes_with_the_data_only(tmp_path, golden):
    first = IndexedDataset(golden).fingerprint
    assert IndexedDataset(golden).fingerprint == first
    for number, tokens in enumerate(([1, 2, 4], [1, 2, 3, 3])):
        with IndexedWriter(tmp_path / str(number), np.uint16) as writer:
            writer.add_document(tokens)
            writer.add_document([4, 5])
        assert IndexedDataset(tmp_path / str(number)).fingerprint != first


def test_existing_dataset_is_replaced_only_when_asked(golden):
    with pytest.raises(DataError, match=r"corpus\.idx exists; choose another place.*--overwrite"):
        IndexedWriter(golden, np.uint16)
    with IndexedWriter(golden, np.uint16, overwrite=True) as writer:
        writer.add_document([7])
    assert _read_all(IndexedDataset(golden)) == [[7]]


def test_dataset_in_use_is_never_replaced(golden):
    with IndexedDataset(golden) as reader:
        with pytest.raises(DataError, match=r"corpus\.bin is in use"):
            IndexedWriter(golden, np.uint16, overwrite=True)
        assert _read_all(reader) == [[1, 2, 3], [4, 5]]
    writer = IndexedWriter(golden, np.uint16, overwrite=True)
    writer.add_document([7])
    with IndexedDataset(golden), pytest.raises(DataError, match="is in use"):
        writer.finalize()  # opened meanwhile
    assert _read_all(IndexedDataset(golden)) == [[1, 2, 3], [4, 5]]


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path):
    code = (
        "import mt_data, os, sys; writer = mt_data.IndexedWriter(sys.argv[1]); "
        "writer.add_document([1, 2]); os.kill(os.getpid(), 9)"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code, tmp_path / "c"], check=False)
        assert len(list(tmp_path.iterdir())) == 1
    alive = IndexedWriter(tmp_path / "alive")
    with IndexedWriter(tmp_path / "c") as writer:
        writer.add_document([1])
    alive.add_document([2])
    alive.finalize()  # what lives is left alone
    names = [f"{name}.{ending}" for name in ("alive", "c") for ending in ("bin", "idx", "json")]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_every_bit_flip_is_named_also_with_remembered_digests(tmp_path):
    with IndexedWriter(tmp_path / "c", np.uint16) as writer:
        writer.add_document(np.arange(2000))
    IndexedDataset(tmp_path / "c").verify(remember=True)
    random = np.random.default_rng(0)
    for _ in range(20):
        path = tmp_path / "c.bin"
        content = bytearray(path.read_bytes())
        at, bit = int(random.integers(len(content))), 1 << int(random.integers(8))
        content[at] ^= bit
        path.write_bytes(content)
        with pytest.raises(DataFileError, match=r"c\.bin: content has changed: expected sha256"):
            IndexedDataset(tmp_path / "c").verify(remember=True)
        content[at] ^= bit
        path.write_bytes(content)
        IndexedDataset(tmp_path / "c").verify(remember=True)


def test_remembered_digests_spare_the_reading(tmp_path, monkeypatch):
    with IndexedWriter(tmp_path / "c", np.uint16) as writer:
        writer.add_document(np.arange(2000))
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    old = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: old() + 10**10)  # else it changed just now
    IndexedDataset(tmp_path / "c").verify(remember=True)
    assert (tmp_path / "c.digests.json").exists()
    monkeypatch.setattr(hashlib, "file_digest", None)
    IndexedDataset(tmp_path / "c").verify(remember=True)
    with pytest.raises(TypeError):
        IndexedDataset(tmp_path / "c").verify()


@pytest.fixture
def mapped(tmp_path, monkeypatch):
    """A data set whose index is mapped, and whose content has been checked once."""
    monkeypatch.setattr(index_module, "MAPPED_FROM", 1)
    lengths = np.random.default_rng(0).integers(0, 9, 300)
    with IndexedWriter(tmp_path / "c", np.uint16) as writer:
        for length in lengths:
            writer.add_document(np.arange(length), [length // 2, length - length // 2])
    old = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: old() + 10**10)  # else it changed just now
    IndexedDataset(tmp_path / "c")
    return tmp_path / "c"


def test_a_mapped_index_is_that_in_memory(mapped, monkeypatch):
    with IndexedDataset(mapped) as dataset:
        assert isinstance(root(dataset.lengths), mmap.mmap)
        rows, documents = _read_all(dataset), [dataset.document(n).tolist() for n in range(300)]
        monkeypatch.setattr(index_module, "MAPPED_FROM", 10**6)
        with IndexedDataset(mapped) as plain:
            assert _read_all(plain) == rows
            assert [plain.document(n).tolist() for n in range(300)] == documents
            assert (plain.fingerprint, plain.num_tokens) == (
                dataset.fingerprint,
                dataset.num_tokens,
            )
            assert pickle.loads(pickle.dumps(dataset)).fingerprint == plain.fingerprint


def root(array):
    """What an array is a view of in the end."""
    base = array
    while getattr(base, "base", None) is not None:
        base = base.base
    return base.obj if isinstance(base, memoryview) else base


def test_a_mapped_index_is_checked_once(mapped, monkeypatch):
    monkeypatch.setattr(index_module, "_check_content", None)
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert len(IndexedDataset(mapped)) == 600
    os.utime(f"{mapped}.idx")
    with pytest.raises(TypeError):  # it may have changed, and is checked
        IndexedDataset(mapped)


@pytest.mark.parametrize("has_record", [True, False])
def test_flipped_bits_of_a_mapped_index_are_named(mapped, has_record):
    path = Path(f"{mapped}.idx")
    content, random, times = path.read_bytes(), np.random.default_rng(1), itertools.count(1)
    if not has_record:
        Path(f"{mapped}.json").unlink()
    wanted = _read_all(IndexedDataset(mapped))

    def write(what):
        path.write_bytes(what)
        os.utime(path, (0, next(times)))  # two writes may have one time, within a tick of the clock

    for _ in range(100):
        flipped = bytearray(content)
        at = int(random.integers(18, len(content)))  # behind the dtype, where another may be right
        flipped[at] ^= 1 << int(random.integers(8))
        write(flipped)
        if has_record:
            with pytest.raises(DataFileError, match=r"c\.idx"):
                IndexedDataset(mapped)
        else:
            with contextlib.suppress(DataFileError):  # a document may begin elsewhere
                assert _read_all(IndexedDataset(mapped)) == wanted
        write(content)
        assert _read_all(IndexedDataset(mapped)) == wanted


def test_a_mapped_index_that_is_replaced_stays_as_it_was(mapped):
    dataset = IndexedDataset(mapped)
    lengths = dataset.lengths.tolist()
    dataset.close()  # a writer replaces no data set in use
    with IndexedWriter(mapped, np.uint16, overwrite=True) as writer:
        writer.add_document([1, 2, 3])
    assert dataset.lengths.tolist() == lengths
    assert IndexedDataset(mapped).lengths.tolist() == [3]


def test_documents_written_at_once_are_as_one_by_one(tmp_path):
    rows = [[1, 2], [], [3], [4, 5, 6]]
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        for row in rows:
            writer.add_document(row)
    with IndexedWriter(tmp_path / "b", np.uint16) as writer:
        writer.add_documents([1, 2, 3], [2, 0, 1])
        writer.add_documents([], [])
        writer.add_document([4, 5, 6])
    for ending in ("bin", "idx", "json"):
        assert (tmp_path / f"a.{ending}").read_bytes() == (tmp_path / f"b.{ending}").read_bytes()
    with IndexedWriter(tmp_path / "c", np.uint16) as writer:
        with pytest.raises(DataError, match="lengths sum to 3, but there are 2 tokens"):
            writer.add_documents([1, 2], [3])
        with pytest.raises(DataError, match="lengths must lie in"):
            writer.add_documents([1, 2], [3, -1])
        writer.add_sequence([1])
        with pytest.raises(DataError, match="call end_document"):
            writer.add_documents([1, 2], [2])
        writer.end_document()
