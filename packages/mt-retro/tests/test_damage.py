"""Damaged, forged and foreign files: a message names the file, and no result is wrong."""

import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from mt_data import DataError, IndexedDataset
from mt_files import FileError
from mt_retro import Database, Neighbours, Vectors, build_database, find_neighbours
from mt_retro.stored import ArrayWriter, digest_of, read_sealed, write_record


@pytest.fixture(scope="module")
def made(corpora, tmp_path_factory):
    """A dataset, a database with an index of faiss, neighbours."""
    folder = tmp_path_factory.mktemp("made")
    documents = corpora.drawn(np.random.default_rng(20), 400)
    dataset = corpora.write(folder / "c", documents)
    database = build_database([folder / "c"], folder / "db", index="IVF4,Flat")
    find_neighbours(database, dataset, folder / "n")
    return folder


@pytest.fixture
def copy(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "copy"))


def verify(folder):
    """Everything that `mt-retro verify N` does."""
    neighbours = Neighbours(folder / "n")
    neighbours.verify()
    neighbours.database.verify()


def files_of(folder):
    return sorted(path for name in ("db", "n") for path in (folder / name).rglob("*.*")
                  if path.is_file())  # fmt: skip


def test_whole_files_are_as_they_were_written(made):
    verify(made)
    assert [path.name for path in files_of(made)] == [
        *["index.faiss", "record.json", "record.json", "vectors.npy"],
        *["ids.npy", "record.json"],
    ]


@pytest.mark.parametrize("flips", [100, pytest.param(20_000, marks=pytest.mark.campaign)])
def test_every_flipped_bit_is_named(copy, flips):
    draw = random.Random(21)
    files = files_of(copy)
    for _ in range(flips):
        path = draw.choice(files)
        content = path.read_bytes()
        place = draw.randrange(len(content))
        changed = bytearray(content)
        changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(DataError) as raised:
            verify(copy)
        path.write_bytes(content)
        assert str(path) in str(raised.value)
        assert len(str(raised.value)) < 1000


def test_damaged_block_is_found_when_it_is_used(copy):
    path = copy / "n" / "ids.npy"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    neighbours = Neighbours(copy / "n")
    with pytest.raises(DataError, match=r"ids\.npy: bytes 0 to \d+ are not those"):
        neighbours.ids(neighbours.chunks.num_documents - 1)
    path = next((copy / "db").glob("vectors-*/vectors.npy"))
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"vectors\.npy: bytes"):
        Database(copy / "db").vectors.gather(np.array([0]))


def replace(folder, name, record, array):
    """Forge an array and its record, with digests that fit."""
    with open(folder / name, "wb") as file:
        writer = ArrayWriter(file, record["dtype"], array.shape)
        writer.write(np.ascontiguousarray(array).tobytes())
    return {key: getattr(writer.end(), key) for key in ("dtype", "header", "blocks")} | {
        "shape": list(array.shape)
    }


@pytest.mark.parametrize("wrong", [-2, -(2**63), 10**6, 2**62])
def test_neighbours_out_of_range_are_refused(copy, wrong):
    record = read_sealed(copy / "n" / "record.json")
    ids = np.load(copy / "n" / "ids.npy")
    ids[5, 1] = wrong
    record["ids"] = replace(copy / "n", "ids.npy", record["ids"], ids)
    write_record(copy / "n" / "record.json", record)
    neighbours = Neighbours(copy / "n")
    document = int(neighbours.chunks.documents(np.array([5]))[0])
    for use in (lambda: neighbours.ids(document), neighbours.verify):
        with pytest.raises(DataError, match=rf"ids\.npy: chunk {wrong} does not exist; there are"):
            use()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_vectors_that_are_no_numbers_are_refused(copy, value):
    folder = next((copy / "db").glob("vectors-*"))
    record = read_sealed(folder / "record.json")
    vectors = np.load(folder / "vectors.npy")
    vectors[17, 3] = value
    record["vectors"] = replace(folder, "vectors.npy", record["vectors"], vectors)
    write_record(folder / "record.json", record)
    with pytest.raises(DataError, match=r"vectors\.npy: vectors: vector 17 has a value"):
        Vectors(folder).verify()
    with pytest.raises(DataError, match="vector 17 has a value"):
        build_database([copy / "c"], copy / "new", embedding=[Vectors(folder)])
    with pytest.raises(DataError, match="these are not the vectors of the database"):
        Database(copy / "db")


def test_index_of_another_build_is_not_given_to_faiss(copy, monkeypatch):
    build_database([copy / "c"], copy / "other", index="IVF3,Flat")
    shutil.copy(copy / "other" / "index.faiss", copy / "db" / "index.faiss")
    monkeypatch.setattr("faiss.read_index", lambda *_: pytest.fail("faiss saw it"))
    database = Database(copy / "db")
    with pytest.raises(DataError, match=r"index\.faiss: expected sha256 .*, found "):
        database.search(np.zeros((1, 256), np.float32), 1)


HOSTILE = [
    b"",
    b"\n",
    b"{}",
    b"[" * 100_000,
    b"\xff" * 100,
    b'{"kind": "database"}',
]
RECORDS = [
    {},
    {"kind": "database"},
    {"kind": 5},
    {"database": "0" * 64},
    {"chunk": 10**30},
    {"chunk": -1},
    {"data_path": 5},
    {"data_path": "\0"},
    {"data_path": "../../../../etc/passwd"},
    {"database_path": "."},
    {"neighbours": 3},
    {"max_overlap": "much"},
    {"ids": None},
    {"ids": {"dtype": "object", "shape": [1, 2], "header": 128, "blocks": "0" * 64}},
    {"ids": {"dtype": "int64", "shape": [2**60, 2], "header": 128, "blocks": "0" * 64}},
    {"ids": {"dtype": "int64", "shape": [-1, 2], "header": 128, "blocks": ""}},
    {"ids": {"dtype": "int64", "shape": [10**18, 0], "header": 1, "blocks": "0" * 64}},
    {"ids": {"dtype": "int64", "shape": [400], "header": 128, "blocks": "0" * 64}},
    {"more": 1},
]


@pytest.mark.parametrize("case", range(len(HOSTILE) + len(RECORDS)))
def test_hostile_records_are_refused(copy, case):
    path = copy / "n" / "record.json"
    if case < len(HOSTILE):
        path.write_bytes(HOSTILE[case])
    else:
        change = RECORDS[case - len(HOSTILE)]
        record = read_sealed(path)
        write_record(path, record | change if change else change)
    with pytest.raises((DataError, FileError)) as raised:
        verify(copy)
    assert len(str(raised.value)) < 1500


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "link", "short", "long", "missing"])
@pytest.mark.parametrize("name", ["n/record.json", "n/ids.npy", "db/record.json"])
def test_what_is_no_file_of_ours_is_refused(copy, kind, name):
    path = copy / name
    content = path.read_bytes()
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        (copy / "outside").write_bytes(content)
        path.symlink_to(copy / "outside")
    elif kind == "short":
        path.write_bytes(content[:-1])
    elif kind == "long":
        path.write_bytes(content + b"\n")
    with pytest.raises((DataError, FileError), match=r"record|ids"):
        verify(copy)


def test_digests_do_not_hang_on_places(copy):
    record = json.loads((copy / "n" / "record.json").read_text().partition("\n")[2])
    moved = record | {"data_path": "elsewhere", "database_path": "there"}
    assert digest_of(moved) == digest_of(record) != digest_of(record | {"neighbours": 3})


def test_all_moves_together(copy, tmp_path):
    shutil.move(copy, tmp_path / "moved")
    verify(tmp_path / "moved")
    assert (
        Database(tmp_path / "moved" / "db").digest
        == Neighbours(
            tmp_path / "moved" / "n", IndexedDataset(tmp_path / "moved" / "c")
        ).record.database
    )
