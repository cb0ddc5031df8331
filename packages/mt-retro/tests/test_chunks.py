"""Chunks: their tokens and the tokens after them follow from the index by arithmetic."""

import numpy as np
import pytest
from mt_data import PADDING, DataError, IndexedDataset, IndexedWriter
from mt_retro import Chunks, NGramEmbedding, build_database, overlaps

DOCUMENTS = [[], [1], list(range(64)), list(range(65)), [], list(range(200)), [7, 7, 7]]


def read(chunks, numbers, *, continued=False):
    rows = chunks.tokens(np.array(numbers, np.int64), continued=continued)
    return [row[row != PADDING].tolist() for row in rows]


@pytest.mark.parametrize("size", [1, 3, 64, 500])
def test_chunks_are_slices_of_documents(corpora, tmp_path, size):
    chunks = Chunks(corpora.write(tmp_path / "c", DOCUMENTS), size)
    expected = corpora.chunks(DOCUMENTS, size)
    assert len(chunks) == len(expected)
    assert read(chunks, range(len(chunks))) == [tokens for _, _, tokens in expected]
    shuffled = np.random.default_rng(0).permutation(len(chunks))
    assert read(chunks, shuffled) == [expected[number][2] for number in shuffled]
    assert chunks.documents(np.arange(len(chunks))).tolist() == [each[0] for each in expected]
    for number, document in enumerate(DOCUMENTS):
        assert len(chunks.of_document(number)) == -(-len(document) // size)


def test_documents_of_several_sequences_are_one_text(tmp_path):
    with IndexedWriter(tmp_path / "c", np.uint16) as writer:
        writer.add_document(list(range(10)), [4, 0, 6])
        writer.add_document(list(range(20, 25)), [5])
    chunks = Chunks(IndexedDataset(tmp_path / "c"), 8)
    assert read(chunks, [0, 1, 2]) == [list(range(8)), [8, 9], list(range(20, 25))]


def test_continuation_ends_with_its_document(corpora, tmp_path):
    chunks = Chunks(corpora.write(tmp_path / "c", DOCUMENTS))
    for number, (document, place, _) in enumerate(corpora.chunks(DOCUMENTS)):
        expected = DOCUMENTS[document][place * 64 : place * 64 + 128]
        assert read(chunks, [number], continued=True) == [expected]


def test_missing_neighbour_is_no_chunk_of_the_database(corpora, tmp_path):
    corpora.write(tmp_path / "c", DOCUMENTS)
    database = build_database([tmp_path / "c"], tmp_path / "db")
    tokens = database.tokens(np.array([[0, -1], [len(database) - 1, -1]]))
    assert tokens.shape == (2, 2, 128)
    assert (tokens[:, 1] == PADDING).all()
    assert tokens[0, 0, 0] == 1
    for wrong in (-2, len(database), 2**40):
        with pytest.raises(DataError, match=f"chunk {wrong} does not exist; there are"):
            database.tokens(np.array([0, wrong]))


def test_chunks_that_do_not_exist_are_refused(corpora, tmp_path):
    chunks = Chunks(corpora.write(tmp_path / "c", DOCUMENTS))
    for wrong in (-1, len(chunks)):
        with pytest.raises(IndexError, match=f"chunk {wrong} does not exist"):
            chunks.tokens(np.array([0, wrong]))
    with pytest.raises(IndexError, match="document 7 does not exist; there are 7"):
        chunks.of_document(7)
    with pytest.raises(DataError, match="a chunk of 0 tokens is too small"):
        Chunks(chunks.dataset, 0)
    with IndexedWriter(tmp_path / "f", np.float32) as writer:
        writer.add_document([1.5])
    with pytest.raises(DataError, match="float32, which are no token ids"):
        Chunks(IndexedDataset(tmp_path / "f"))


def test_embedding_is_frozen_and_its_distances_are_exact_in_fp32():
    chunks = np.random.default_rng(5).integers(0, 50_000, (40, 64))
    chunks[3, 20:] = PADDING
    vectors = NGramEmbedding()(chunks)
    assert vectors.dtype == np.float32
    assert np.abs((vectors.astype(np.float64) ** 2).sum(axis=1) - 1).max() < 0.01
    products = vectors @ vectors.T
    assert (products == vectors.astype(np.float64) @ vectors.astype(np.float64).T).all()
    # The values are a file format: a database made with them is searched with them later.
    sums = (np.rint(vectors * 1024).astype(np.int64) * np.arange(1, 257)).sum(axis=1)
    assert sums[:4].tolist() == [-56133, -421285, -96146, 55055]
    alone = NGramEmbedding()(chunks[3:4, :20])
    assert alone.tolist() == vectors[3:4].tolist()


def test_chunks_with_common_runs_are_nearer():
    draw = np.random.default_rng(6)
    text, other = draw.integers(0, 1000, (2, 64))
    halved = np.concatenate([text[:32], other[:32]])
    reordered = draw.permutation(text)
    vectors = NGramEmbedding()(np.stack([text, halved, reordered, other])).astype(np.float64)
    distances = ((vectors[0] - vectors) ** 2).sum(axis=1)
    assert distances[0] == 0 < distances[1] < distances[2] < distances[3]


def test_overlap_is_the_longest_common_run(monkeypatch):
    def longest(a, b):
        return max(
            (n for n in range(1, len(a) + 1) for i in range(len(a) - n + 1) if a[i : i + n] in b),
            default=0,
        )

    monkeypatch.setattr("mt_retro.overlap._MOST", 100)
    draw = np.random.default_rng(7)
    texts = draw.integers(97, 100, (30, 12))
    others = draw.integers(97, 100, (30, 2, 9))
    texts[3, 5:], others[4, :, 2:], texts[5], others[6] = PADDING, PADDING, PADDING, PADDING
    found = overlaps(texts, others)

    def word(row):
        return "".join(map(chr, row[row != PADDING]))

    for text, row, shares in zip(texts, others, found, strict=True):
        size = max(len(word(text)), 1)
        assert shares.tolist() == [longest(word(text), word(other)) / size for other in row]
