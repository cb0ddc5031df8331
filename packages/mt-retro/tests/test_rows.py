"""Rows agree with plain slices of the documents and of the database."""

from itertools import pairwise

import numpy as np
import pytest
from mt_data import (
    PADDING,
    BatchSampler,
    DataError,
    IndexedDataset,
    Mixture,
    Rows,
    mixed,
    mixture_sources,
)
from mt_retro import (
    Neighbours,
    RetroDataset,
    build_database,
    find_neighbours,
    neighbours_of,
    overlaps,
)

LENGTH, CHUNK = 256, 64


class Made:
    """A dataset, a database with half of it, the neighbours, and the neighbours by brute force."""

    def __init__(self, corpora, folder, draw, chunks, k):
        self.documents = corpora.drawn(draw, chunks, 12)
        others = corpora.drawn(draw, chunks, 12)
        self.dataset = corpora.write(folder / "train", self.documents)
        corpora.write(folder / "others", others)
        self.database = build_database([folder / "others", folder / "train"], folder / "db")
        find_neighbours(self.database, self.dataset, folder / "near", neighbours=k)
        self.near = Neighbours(folder / "near")
        mine, theirs = corpora.chunks(self.documents), corpora.chunks(others)
        keys = corpora.vectors([*theirs, *mine])
        own = [-1] * len(theirs) + [document for document, _, _ in mine]
        ids = corpora.oracle(
            keys[len(theirs) :], keys, k, lambda row, key: own[key] != mine[row][0]
        )
        passages = [(others[d], at) for d, at, _ in theirs]
        passages += [(self.documents[d], at) for d, at, _ in mine]
        self.read = {
            (document, at): [
                passages[i][0][passages[i][1] * CHUNK :][: 2 * CHUNK] if i >= 0 else [] for i in row
            ]
            for (document, at, _), row in zip(mine, ids, strict=True)
        }


@pytest.fixture(scope="module")
def made(corpora, tmp_path_factory):
    return Made(corpora, tmp_path_factory.mktemp("rows"), np.random.default_rng(2), 60, 3)


@pytest.mark.parametrize(("chunks", "k"), [(60, 3), (2, 5)], ids=["usual", "fewer-than-k"])
def test_rows_equal_brute_force(corpora, tmp_path, chunks, k):
    made = Made(corpora, tmp_path, np.random.default_rng(chunks), chunks, k)
    rows = RetroDataset(made.near, sequence_length=LENGTH, seed=3)
    labelled, places = [], 0
    for index in range(len(rows)):
        row, expected, at = rows.row(index), rows.empty(), 0
        for number, (document, start, size) in enumerate(rows.parts(index)):
            text, count = made.documents[document][start : start + size + 1], -(-size // CHUNK)
            expected["tokens"][at : at + size] = text[:-1]
            expected["labels"][at : at + size] = text[1:]
            expected["documents"][at : at + count * CHUNK] = number
            expected["positions"][at : at + count * CHUNK] = np.arange(count * CHUNK)
            for turn in range(count):
                read = made.read[document, start // CHUNK + turn]
                for rank, passage in enumerate(read):
                    expected["neighbours"][at // CHUNK + turn, rank, : len(passage)] = passage
                    expected["neighbour_lengths"][at // CHUNK + turn, rank] = len(passage)
            assert start % LENGTH == 0
            labelled += [(document, start + place + 1) for place in range(size)]
            at += count * CHUNK
        assert row.keys() == expected.keys() == {field.name for field in rows.fields}
        assert all((row[name] == expected[name]).all() for name in row)
        places += LENGTH
    # An epoch has every token after the first of its document as a label once.
    lengths = enumerate(map(len, made.documents))
    assert sorted(labelled) == [(d, i) for d, length in lengths for i in range(1, length)]
    assert rows.filling == pytest.approx(len(labelled) / places)
    if k == 5:
        assert (made.near.ids(int(np.argmax([*map(len, made.documents)]))) == -1).any()


def test_rows_depend_on_their_number_alone(made):
    """Another seed, length or number of neighbours needs no query; a resumed run goes on."""
    rows = RetroDataset(made.near, sequence_length=LENGTH, seed=3)
    again = RetroDataset(Neighbours(made.near.folder), sequence_length=LENGTH, seed=3)
    late = 3 * len(rows) + 1  # in a later epoch, with nothing read before
    assert all((again.row(late)[name] == x).all() for name, x in rows.row(late).items())
    assert again.fingerprint == rows.fingerprint
    others = [
        RetroDataset(made.near, sequence_length=LENGTH, seed=4),
        RetroDataset(made.near, sequence_length=2 * LENGTH, seed=3),
        RetroDataset(made.near, sequence_length=LENGTH, seed=3, num_neighbours=1),
    ]
    for other in others:
        document, start, size = other.parts(0)[0]
        row = other.row(0)
        count = -(-size // CHUNK)
        read = made.near.tokens(document)[start // CHUNK : start // CHUNK + count]
        read = np.where(read == PADDING, 0, read)[:, : other.num_neighbours]
        assert (row["neighbours"][:count] == read).all()
    assert len({rows.fingerprint, *(other.fingerprint for other in others)}) == 4


def test_the_rows_of_a_batch_are_the_same_alone(made):
    how = {"sequence_length": LENGTH, "num_neighbours": 2}
    near, bare = (RetroDataset(made.near, **how, retrieves=each) for each in (True, False))
    sources = mixture_sources([near, bare], [2, 1])
    both = mixed([near, bare], Mixture(sources=sources), num_samples=9)
    batch = Rows().read(both, np.array([0, 7, -1, 1, 2]))
    for place, number in enumerate((0, 7, -1, 1, 2)):
        alone = both.row(number) if number >= 0 else both.empty()
        for name, array in alone.items():
            assert (batch[name][place] == array).all()
    has = batch["neighbours"].any(axis=(1, 2, 3)).tolist()
    assert has == [number >= 0 and both.origin(number)[0] == 0 for number in (0, 7, -1, 1, 2)]
    assert len(set(has)) == 2


def test_ranks_that_share_a_row_have_the_neighbours_of_their_chunks(made):
    rows = RetroDataset(made.near, sequence_length=LENGTH, seed=3)
    whole = Rows(packing="documents").read(rows, np.arange(4))
    for parts in (((0, 64), (192, 256)), ((64, 192),)):
        cut = Rows(packing="documents", parts=parts).read(rows, np.arange(4))
        own = np.concatenate([np.arange(*part) for part in parts])
        chunks = own[::CHUNK] // CHUNK
        assert (cut["tokens"] == whole["tokens"][:, own]).all()
        assert (cut["documents"] == whole["documents"]).all()
        for name in ("neighbours", "neighbour_lengths"):
            assert (cut[name] == whole[name][:, chunks]).all()
    with pytest.raises(DataError, match="can't be cut like rows of 256 tokens"):
        Rows(parts=((0, 32), (224, 256))).read(rows, np.arange(1))


def test_a_step_of_a_sampler_has_them(made):
    rows = RetroDataset(made.near, sequence_length=LENGTH)
    sampler = BatchSampler(rows, global_batch_size=4, micro_batch_size=2, vocab_size=12)
    batches = sampler.step(0)
    assert [batch["neighbours"].shape for batch in batches] == [(2, 4, 3, 128)] * 2
    for batch in (*batches, Rows().read(rows, np.array([3, 1, 3, -1]))):
        for place, number in enumerate(batch["sample_ids"].tolist()):
            row = rows.row(number) if number >= 0 else rows.empty()
            for name in ("neighbours", "neighbour_lengths"):
                assert (batch[name][place] == row[name]).all()
        assert batch["neighbours"].flags.writeable
    small = BatchSampler(rows, global_batch_size=4, micro_batch_size=2, vocab_size=11)
    with pytest.raises(DataError, match="token id 11"):
        small.step(0)


def test_labels_by_the_overlap_of_what_they_are_predicted_from(made):
    """Ranges of shares divide the labels with a neighbour, as a slow count of overlaps does."""
    edges = [0.0, 0.1, 0.5, 1.0]
    how = {"sequence_length": LENGTH, "seed": 3}
    whole = RetroDataset(made.near, **how)
    parts = [RetroDataset(made.near, **how, overlap=edge) for edge in pairwise(edges)]
    counts = np.zeros(3, int)
    for index in range(len(whole)):
        found, at = [each.row(index)["labels"] for each in parts], 0
        for document, start, size in whole.parts(index):
            for place in range(size):
                chunk = (place + 1) // CHUNK  # of the label, in the row's part
                read = made.read[document, start // CHUNK + chunk - 1] if chunk else []
                kept = [labels[at + place] != PADDING for labels in found]
                if not any(map(len, read)):
                    assert not any(kept)
                    continue
                begin = start + chunk * CHUNK
                text = made.documents[document][begin : min(begin + CHUNK, start + size + 1)]
                padded = np.full((1, len(read), 2 * CHUNK), PADDING)
                for row, passage in zip(padded[0], read, strict=True):
                    row[: len(passage)] = passage
                share = overlaps(np.array([text]), padded).max()
                expected = 0 if share < 0.1 else 1 if share < 0.5 else 2
                assert kept == [number == expected for number in range(3)]
                counts[expected] += 1
            at += -(-size // CHUNK) * CHUNK
    assert (counts > 0).all()


def test_rows_without_neighbours_are_the_same_texts(made):
    rows = RetroDataset(made.near, sequence_length=LENGTH).row(1)
    bare = RetroDataset(made.near, sequence_length=LENGTH, retrieves=False).row(1)
    assert not bare["neighbours"].any()
    assert not bare["neighbour_lengths"].any()
    assert rows["neighbour_lengths"].any()
    for name in ("tokens", "labels", "documents", "positions"):
        assert (rows[name] == bare[name]).all()


def test_the_folder_of_a_dataset_is_found_by_its_digest(corpora, made, tmp_path):
    held = corpora.write(tmp_path / "held", corpora.drawn(np.random.default_rng(5), 10, 12))
    find_neighbours(made.database, held, tmp_path / "near-held", neighbours=3)
    folders = [made.near.folder, tmp_path / "near-held"]
    assert neighbours_of(held, folders, made.database).folder == tmp_path / "near-held"
    found = neighbours_of(IndexedDataset(made.dataset.prefix), folders, made.database)
    assert found.folder == made.near.folder
    with pytest.raises(DataError, match=r"held: no folder has neighbours of this dataset.*near is"):
        neighbours_of(held, folders[:1], made.database)
    other = build_database([tmp_path / "held"], tmp_path / "db2")
    with pytest.raises(DataError, match=r"near-held: these neighbours are of another database"):
        neighbours_of(held, folders, other)


def test_what_makes_no_rows_is_refused(corpora, made, tmp_path):
    for options, words in (
        ({"sequence_length": 100}, "a chunk has 64 tokens; use a multiple of 64"),
        ({"sequence_length": 0}, "use a multiple of 64"),
        ({"sequence_length": 64, "num_neighbours": 4}, "has 3 of each chunk; use 1 to 3"),
    ):
        with pytest.raises(DataError, match=words):
            RetroDataset(made.near, **options)
    single = corpora.write(tmp_path / "single", [[1], [], [2]])
    database = build_database([tmp_path / "single"], tmp_path / "db")
    near = find_neighbours(database, single, tmp_path / "near")
    with pytest.raises(DataError, match="has no document of two tokens"):
        RetroDataset(near, sequence_length=64)
