"""Stored neighbours agree with a comparison of all chunks, however they were made."""

import os

import numpy as np
import pytest
from mt_data import PADDING, DataError, IndexedDataset, Part, merge_datasets
from mt_retro import (
    Chunks,
    Database,
    Neighbours,
    NGramEmbedding,
    Vectors,
    build_database,
    embed_chunks,
    find_neighbours,
    overlaps,
)


def all_ids(neighbours):
    return np.concatenate(
        [neighbours.ids(document) for document in range(neighbours.chunks.num_documents)]
    )


def in_parts(make, count):
    """Call `make` for each part, from the last to the first; only the last call completes it."""
    for number in range(count, 1, -1):
        assert make(part=Part(number=number, count=count)) is None
    return make(part=Part(number=1, count=count))


@pytest.mark.parametrize("case", range(20))
def test_neighbours_equal_brute_force(corpora, tmp_path, case):
    draw = np.random.default_rng(case)
    size = 50_000 if case == 19 else int(10 ** draw.uniform(0.7, 3.2))
    few = max(size // 8, 1) if case < 19 else 50
    halves = [corpora.drawn(draw, each, [5, 30, 1000][case % 3]) for each in (size - few, few)]
    for name, documents in zip("ab", halves, strict=True):
        corpora.write(tmp_path / name, documents)
    database = build_database([tmp_path / "a", tmp_path / "b"], tmp_path / "db")
    chunks = [corpora.chunks(documents) for documents in halves]
    keys = corpora.vectors([*chunks[0], *chunks[1]])
    assert len(database) == len(keys)

    mine = chunks[1]  # of the second dataset, behind the chunks of the first
    checked = draw.choice(len(mine), min(len(mine), 12), replace=False)
    first = len(chunks[0])
    own = [-1] * first + [document for document, _, _ in mine]
    expected = corpora.oracle(
        keys[first + checked], keys, 3, lambda row, key: own[key] != mine[checked[row]][0]
    )
    found = []
    for parts in (1, 3, 8) if case < 19 else (8,):

        def make(part, parts=parts):
            dataset = IndexedDataset(tmp_path / "b")
            return find_neighbours(
                database, dataset, tmp_path / f"n{parts}", neighbours=3, part=part
            )

        # Small sets have fewer blocks than parts, which then are complete at once.
        for number in range(parts, 0, -1):
            neighbours = make(Part(number=number, count=parts))
        found.append(all_ids(neighbours))
    assert found[0][checked].tolist() == expected.tolist()
    assert all((ids == found[0]).all() for ids in found)
    if case < 3:
        assert Neighbours(tmp_path / "n1").tokens(0).shape[1:] == (3, 128)


@pytest.fixture
def small(corpora, tmp_path):
    """A database of 700 chunks, and its dataset."""
    documents = corpora.drawn(np.random.default_rng(3), 700, 20)
    dataset = corpora.write(tmp_path / "c", documents)
    return build_database([tmp_path / "c"], tmp_path / "db"), dataset


def test_parts_are_blocks_that_the_last_one_joins(small, tmp_path):
    database, dataset = small

    def make(part=None):
        return find_neighbours(database, dataset, tmp_path / "n", part=part)

    whole = all_ids(find_neighbours(database, dataset, tmp_path / "whole"))
    make(Part(number=3, count=5))
    with pytest.raises(DataError, match="is not complete: give the command that makes it again"):
        Neighbours(tmp_path / "n")
    assert (all_ids(in_parts(make, 5)) == whole).all()
    assert sorted(os.listdir(tmp_path / "n")) == ["ids.npy", "record.json"]
    assert (np.load(tmp_path / "n" / "ids.npy") == whole).all()
    assert (all_ids(make()) == whole).all()  # nothing is left to do
    files = {name: (tmp_path / name / "ids.npy").read_bytes() for name in ("n", "whole")}
    assert files["n"] == files["whole"]


def test_other_work_in_a_folder_is_refused(small, tmp_path):
    database, dataset = small
    find_neighbours(database, dataset, tmp_path / "n", part=Part(number=1, count=4))
    with pytest.raises(DataError, match="begun with neighbours 2, and this command has 3"):
        find_neighbours(database, dataset, tmp_path / "n", neighbours=3)
    find_neighbours(database, dataset, tmp_path / "n")
    with pytest.raises(DataError, match=r"begun with max_overlap None, and this command has 0\.5"):
        find_neighbours(database, dataset, tmp_path / "n", max_overlap=0.5)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(DataError, match=r"holds something else, such as thesis\.tex"):
        find_neighbours(database, dataset, tmp_path / "mine")


def test_damaged_block_is_made_anew(small, tmp_path):
    database, dataset = small
    whole = all_ids(find_neighbours(database, dataset, tmp_path / "whole"))
    find_neighbours(database, dataset, tmp_path / "n", part=Part(number=1, count=2))
    block = min((tmp_path / "n" / "blocks").iterdir())
    content = bytearray(block.read_bytes())
    content[5] ^= 4
    block.write_bytes(content)
    with pytest.raises(DataError, match="was damaged, and is removed; give the same command"):
        find_neighbours(database, dataset, tmp_path / "n", part=Part(number=2, count=2))
    assert (all_ids(find_neighbours(database, dataset, tmp_path / "n")) == whole).all()


def test_none_is_of_the_own_document_nor_reaches_into_it(corpora, tmp_path):
    """A document's own chunks are nearest; in the file, the chunk before continues into it."""
    draw = np.random.default_rng(8)
    text = draw.integers(0, 50, 64 * 6).tolist()
    documents = [text[:64], text[64:192], text[192:], draw.integers(0, 50, 64).tolist()]
    dataset = corpora.write(tmp_path / "c", documents)
    database = build_database([tmp_path / "c"], tmp_path / "db")
    neighbours = find_neighbours(database, dataset, tmp_path / "n", neighbours=7)
    for document, tokens in enumerate(documents):
        ids = neighbours.ids(document)
        own = set(neighbours.chunks.of_document(document))
        for row in ids:
            assert set(row[row >= 0]) == set(range(len(database))) - own
            assert (row[len(database) - len(own) :] == -1).all()
        for passages in neighbours.tokens(document):
            for passage in passages:
                there = passage[passage != PADDING].tolist()
                assert (passage[len(there) :] == PADDING).all()
                sources = [documents[other] for other in range(4) if other != document]
                assert any(there == source[i : i + len(there)] for source in sources
                           for i in range(0, len(source), 64)) or not there  # fmt: skip
        assert tokens is documents[document]


def test_own_document_is_known_in_a_copy_at_another_place(corpora, tmp_path):
    documents = corpora.drawn(np.random.default_rng(9), 100)
    for name in ("c", "copy"):
        corpora.write(tmp_path / name, documents)
    database = build_database([tmp_path / "c"], tmp_path / "db")
    ids = [
        all_ids(find_neighbours(database, IndexedDataset(tmp_path / name), tmp_path / f"n-{name}"))
        for name in ("c", "copy")
    ]
    assert (ids[0] == ids[1]).all()
    moved = Neighbours(tmp_path / "n-c", IndexedDataset(tmp_path / "copy"), database)
    assert (all_ids(moved) == ids[0]).all()


def test_overlap_bound_leaves_out_what_repeats_the_text(corpora, tmp_path):
    draw = np.random.default_rng(10)
    documents = corpora.drawn(draw, 80, 8)
    dataset = corpora.write(tmp_path / "c", documents)
    database = build_database([tmp_path / "c"], tmp_path / "db")
    chunks = corpora.chunks(documents)
    numbers = np.arange(len(chunks))
    texts = database.tokens(numbers)
    keys = corpora.vectors(chunks)
    shares = overlaps(texts, np.broadcast_to(texts, (len(texts), *texts.shape)))
    for most in (0.0, 0.1, 0.5):
        found = find_neighbours(
            database, dataset, tmp_path / f"n{most}", neighbours=4, max_overlap=most
        )
        expected = corpora.oracle(
            keys,
            keys,
            4,
            lambda row, key, most=most: (
                chunks[row][0] != chunks[key][0] and shares[row, key] <= most
            ),
        )
        assert all_ids(found).tolist() == expected.tolist()
    for wrong in (-0.1, 1.0):
        with pytest.raises(DataError, match="a share in"):
            find_neighbours(database, dataset, tmp_path / "x", max_overlap=wrong)


def test_databases_join_with_their_digests(corpora, tmp_path):
    draw = np.random.default_rng(11)
    for name in "abc":
        corpora.write(tmp_path / name, corpora.drawn(draw, 90))
    whole = build_database([tmp_path / name for name in "abc"], tmp_path / "whole")
    ab = build_database([tmp_path / "a", tmp_path / "b"], tmp_path / "ab")
    joined = build_database([ab.folder, tmp_path / "c"], tmp_path / "joined")
    assert joined.digest == whole.digest != ab.digest
    assert joined.record.sources[0].vectors_path.startswith("../ab/")  # nothing is copied
    tokens = (each.tokens(np.arange(len(whole))) for each in (joined, whole))
    assert (next(tokens) == next(tokens)).all()
    with pytest.raises(DataError, match="are one dataset; give it once"):
        build_database([ab.folder, tmp_path / "a"], tmp_path / "twice")


def test_other_data_or_database_is_refused_by_name(corpora, tmp_path):
    draw = np.random.default_rng(12)
    for name in "ab":
        corpora.write(tmp_path / name, corpora.drawn(draw, 90))
    for name in "ab":
        build_database([tmp_path / name], tmp_path / f"db-{name}")
    a, b = Database(tmp_path / "db-a"), Database(tmp_path / "db-b")
    dataset = IndexedDataset(tmp_path / "a")
    find_neighbours(a, dataset, tmp_path / "n")
    with pytest.raises(DataError, match=r"of another database than .*db-b"):
        Neighbours(tmp_path / "n", dataset, b)
    with pytest.raises(DataError, match=r"of another dataset than .*/b:"):
        Neighbours(tmp_path / "n", IndexedDataset(tmp_path / "b"), a)
    for ending in ("bin", "idx", "json"):
        (tmp_path / f"a.{ending}").unlink()
    merge_datasets([tmp_path / "b"], tmp_path / "a")
    with pytest.raises(DataError, match=r"a\.idx: is not the dataset of the database"):
        Database(tmp_path / "db-a")


def test_tokens_of_another_tool_have_a_digest_too(corpora, tmp_path):
    documents = corpora.drawn(np.random.default_rng(13), 90)
    corpora.write(tmp_path / "c", documents)
    (tmp_path / "c.json").unlink()
    database = build_database([tmp_path / "c"], tmp_path / "db")
    assert len(database) == len(corpora.chunks(documents))
    path = tmp_path / "c.bin"
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"c\.idx: is not the dataset of the database"):
        Database(tmp_path / "db")


class Reversed:
    """An embedding from another package."""

    name, dim = "reversed", 256

    def __call__(self, chunks):
        return NGramEmbedding()(chunks)[:, ::-1]


def test_what_a_killed_process_was_joining_goes_when_another_joins(corpora, tmp_path):
    chunks = Chunks(corpora.write(tmp_path / "a", corpora.drawn(np.random.default_rng(0), 200)))
    left = tmp_path / "e" / f".vectors.npy.tmp-{'0' * 32}"
    part = Part(number=1, count=2)
    for share in (part, None):  # a part alone joins nothing; after all of them, all is complete
        embed_chunks(chunks, tmp_path / "e", NGramEmbedding(), part=share)
        left.touch()
    embed_chunks(chunks, tmp_path / "e", NGramEmbedding())
    assert {path.name for path in (tmp_path / "e").iterdir()} == {"vectors.npy", "record.json"}


def test_embeddings_come_as_folders(corpora, tmp_path):
    draw = np.random.default_rng(14)
    for name in "ab":
        dataset = corpora.write(tmp_path / name, corpora.drawn(draw, 200))
        in_parts(
            lambda part, name=name, dataset=dataset: (
                embed_chunks(Chunks(dataset), tmp_path / f"e-{name}", Reversed(), part=part) or None
            ),
            3,
        )
    database = build_database(
        [tmp_path / "a"], tmp_path / "db", embedding=[Vectors(tmp_path / "e-a")]
    )
    assert database.record.embedding == "reversed"
    ours = build_database([tmp_path / "a"], tmp_path / "ours")
    dataset = IndexedDataset(tmp_path / "b")
    found = find_neighbours(database, dataset, tmp_path / "n", embedding=Vectors(tmp_path / "e-b"))
    assert (all_ids(found) == all_ids(find_neighbours(ours, dataset, tmp_path / "m"))).all()
    called = find_neighbours(database, dataset, tmp_path / "o", embedding=Reversed())
    assert (all_ids(called) == all_ids(found)).all()
    with pytest.raises(DataError, match="was made with the embedding 'reversed'; give vectors"):
        find_neighbours(database, dataset, tmp_path / "p")
    with pytest.raises(DataError, match=r"has vectors of ngrams.*, and these are of reversed"):
        find_neighbours(ours, dataset, tmp_path / "p", embedding=Vectors(tmp_path / "e-b"))
    with pytest.raises(DataError, match="these vectors are not of the chunks of"):
        find_neighbours(database, dataset, tmp_path / "p", embedding=Vectors(tmp_path / "e-a"))
    with pytest.raises(DataError, match=r"these vectors are of .*/b, which is none"):
        build_database([tmp_path / "a"], tmp_path / "x", embedding=[Vectors(tmp_path / "e-b")])
    with pytest.raises(DataError, match="use one embedding for all"):
        build_database(
            [tmp_path / "a", tmp_path / "b"], tmp_path / "x", embedding=[Vectors(tmp_path / "e-a")]
        )
