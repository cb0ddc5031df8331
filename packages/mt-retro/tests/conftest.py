"""Random corpora, and the expected neighbours of their chunks."""

import numpy as np
import pytest
from mt_data import PADDING, IndexedDataset, IndexedWriter
from mt_retro import NGramEmbedding


def drawn_documents(draw, count, vocabulary=30):
    """Documents of any length: empty, short, at the edges of chunks, long; some are equal."""
    documents, chunks = [], 0
    while chunks < count:
        length = draw.choice([0, 1, 3, 20, 63, 64, 65, 128, draw.integers(1, 400)])
        documents.append(draw.integers(0, vocabulary, length).tolist())
        if draw.random() < 0.2:
            documents[-1] = documents[draw.integers(len(documents))]
        chunks += -(-len(documents[-1]) // 64)
    return documents


def write(prefix, documents):
    with IndexedWriter(prefix, np.uint16) as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedDataset(prefix)


def chunks_of(documents, size=64):
    """Every chunk of documents as (document, place in the document, tokens), by plain slices."""
    return [
        (number, place // size, document[place : place + size])
        for number, document in enumerate(documents)
        for place in range(0, len(document), size)
    ]


def vectors_of(chunks, size=64):
    rows = np.full((len(chunks), size), PADDING)
    for row, (_, _, tokens) in zip(rows, chunks, strict=True):
        row[: len(tokens)] = tokens
    return NGramEmbedding()(rows).astype(np.float64)


def oracle(queries, keys, k, allowed=lambda query, key: True):
    """Compare each query with each key, and sort the allowed keys by distance and number."""
    found = np.full((len(queries), k), -1)
    for row, query in enumerate(queries):
        distances = ((query - keys) ** 2).sum(axis=1)
        order = sorted(range(len(keys)), key=lambda key: (distances[key], key))
        best = (key for key in order if allowed(row, key))
        for rank, key in zip(range(k), best, strict=False):
            found[row, rank] = key
    return found


class Corpora:
    drawn, write, chunks, vectors, oracle = map(
        staticmethod, (drawn_documents, write, chunks_of, vectors_of, oracle)
    )


@pytest.fixture(scope="session")
def corpora():
    return Corpora
