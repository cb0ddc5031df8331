"""faiss indexes: flat ones are exact, others nearly so, and too small corpora are refused."""

import sys

import numpy as np
import pytest
from mt_data import DataError
from mt_files import MissingExtraError
from mt_retro import Chunks, Database, build_database, exact_neighbours, find_neighbours
from mt_retro.approximate import choose_index


class Given:
    """An embedding of given vectors, for chunks that hold the numbers of their vectors."""

    name = "given"

    def __init__(self, vectors):
        self.vectors, self.dim = vectors, vectors.shape[1]

    def __call__(self, chunks):
        return self.vectors[chunks[:, 0]]


def database_of(corpora, folder, vectors, index):
    if not (folder / "c.idx").exists():
        corpora.write(folder / "c", [[number] for number in range(len(vectors))])
    return build_database(
        [folder / "c"], folder / index, embedding=Given(vectors.astype(np.float32)), index=index
    )


def clustered(draw, count, dim, clusters):
    centres = draw.standard_normal((clusters, dim))
    return centres[draw.integers(0, clusters, count)] + 0.3 * draw.standard_normal((count, dim))


@pytest.mark.parametrize("kind", ["drawn", "equal", "all equal"])
def test_flat_finds_what_exact_search_finds(corpora, tmp_path, kind):
    draw = np.random.default_rng(30)
    vectors = clustered(draw, 2000, 24, 10)
    if kind != "drawn":
        vectors = vectors[draw.integers(0, 40 if kind == "equal" else 1, 2000)]
    database = database_of(corpora, tmp_path, vectors, "Flat")
    queries = np.concatenate([vectors[:20], draw.standard_normal((20, 24))]).astype(np.float32)
    excluded = np.sort(draw.integers(0, 2001, (40, 2)), axis=1)
    for ranges in (None, excluded):
        found = database.search(queries, 20, excluded=ranges)
        expected = exact_neighbours(queries, vectors.astype(np.float32), 20, excluded=ranges)
        assert found[0].tolist() == expected[0].tolist()
        assert found[1].tolist() == expected[1].tolist()


def test_lists_find_nearly_all_of_clustered_vectors(corpora, tmp_path):
    vectors = clustered(np.random.default_rng(31), 12_000, 32, 300)
    database = database_of(corpora, tmp_path, vectors, "IVF256,Flat")
    queries = vectors[:200].astype(np.float32)
    found = database.search(queries, 20)[0]
    expected = exact_neighbours(queries, vectors.astype(np.float32), 20)[0]
    hits = [len(set(a) & set(b)) for a, b in zip(found.tolist(), expected.tolist(), strict=True)]
    assert np.mean(hits) / 20 >= 0.95
    again = Database(database.folder).search(queries, 20)[0]
    assert (again == found).all()


def test_neighbours_by_an_index_are_those_of_exact_search(corpora, tmp_path):
    dataset = corpora.write(tmp_path / "c", corpora.drawn(np.random.default_rng(32), 600))
    ids = []
    for index in ("exact", "Flat"):
        database = build_database([tmp_path / "c"], tmp_path / index, index=index)
        neighbours = find_neighbours(database, dataset, tmp_path / f"n-{index}")
        ids.append(np.load(neighbours.folder / "ids.npy"))
    assert (ids[0] == ids[1]).all()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            "IVF64,Flat",
            "needs 2496 chunks to be trained, and the database has 100; use --index IVF",
        ),
        ("IVF4096_HNSW32,PQ32", "needs 159744 chunks"),
        ("PQ16", "needs 9984 chunks"),
        ("OPQ16,IVF2,PQ16x4", "needs 624 chunks"),
        ("Nonsense", "'Nonsense' is no factory string of faiss for 256 dims"),
    ],
)
def test_too_few_chunks_are_refused_with_what_would_do(corpora, tmp_path, index, message):
    corpora.write(tmp_path / "c", [[number] for number in range(100)])
    with pytest.raises(DataError, match=message):
        build_database([tmp_path / "c"], tmp_path / "db", index=index)


def test_what_would_do_does(corpora, tmp_path):
    corpora.write(tmp_path / "c", [[number] for number in range(100)])
    with pytest.raises(DataError, match="use --index IVF2,Flat or --index exact"):
        build_database([tmp_path / "c"], tmp_path / "db", index="IVF64,Flat")
    database = build_database([tmp_path / "c"], tmp_path / "db", index="IVF2,Flat")
    assert database.record.index.factory == "IVF2,Flat"
    with pytest.raises(DataError, match="has 30; use --index exact"):
        choose_index("IVF1,Flat", 30)


def test_index_is_chosen_by_size():
    assert choose_index("auto", 5) == choose_index("auto", 100_000) == "exact"
    assert choose_index("auto", 1_000_000) == "IVF4096,Flat"


def test_missing_faiss_is_said(corpora, tmp_path, monkeypatch):
    corpora.write(tmp_path / "c", [[1], [2]])
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingExtraError, match=r"needs: pip install 'mt-retro\[faiss\]'"):
        build_database([tmp_path / "c"], tmp_path / "db", index="Flat")
    assert len(build_database([tmp_path / "c"], tmp_path / "db")) == 2
    assert len(Chunks(Database(tmp_path / "db").sources[0].dataset)) == 2
