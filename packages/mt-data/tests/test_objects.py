"""Object stores: moto's server on loopback behind a proxy that fails one request in ten."""

import sys
from pathlib import Path

import numpy as np
import pytest
from mt_data import DataError, DataFileError, IndexedDataset, IndexedWriter, read_documents
from mt_data.documents.source import _matches
from mt_data.storage import objects
from mt_files import FileError

sys.path.append(str(Path(__file__).parent))
from unsteady import failing, moto, unsteady, variables


class Store:
    """A bucket behind the proxy."""

    def __init__(self, proxy):
        import obstore

        self.proxy, self._library = proxy, obstore
        self._store = obstore.store.from_url("s3://bucket", retry_config={"max_retries": 3})

    def put(self, path, content):
        fault, self.proxy.fault = self.proxy.fault, None
        self._library.put(self._store, path, content)
        self.proxy.fault = fault


@pytest.fixture(scope="module")
def server():
    with moto() as port:
        yield port


@pytest.fixture
def store(server, monkeypatch, tmp_path):
    monkeypatch.setattr(objects, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(objects, "BLOCK", 1 << 12)  # many requests
    with unsteady(server) as proxy:
        for name, value in {**variables(proxy), "HOME": str(tmp_path)}.items():  # copies of indexes
            monkeypatch.setenv(name, value)
        yield Store(proxy)


def written(folder: Path, documents):
    with IndexedWriter(folder / "corpus", np.int32) as writer:
        for document in documents:
            writer.add_document(document)
    return [(ending, Path(f"{folder}/corpus{ending}").read_bytes()) for ending in ENDINGS]


ENDINGS = (".bin", ".idx", ".json")
DOCUMENTS = [np.arange(number, number + 900) for number in range(40)]


def test_token_files_give_the_same_tokens_though_requests_fail(store, tmp_path):
    for ending, content in written(tmp_path, DOCUMENTS):
        store.put(f"data/corpus{ending}", content)
    store.proxy.fault = failing(0.1, 0)
    local = IndexedDataset(tmp_path / "corpus")
    # As text, and as a `Path` writes it.
    for prefix in ("s3://bucket/data/corpus", Path("s3://bucket/data/corpus")):
        with IndexedDataset(prefix) as found:
            assert found.fingerprint == local.fingerprint
            for number, document in enumerate(DOCUMENTS):
                np.testing.assert_array_equal(found[number], document)
            np.testing.assert_array_equal(found.read(7, 100, 50), DOCUMENTS[7][100:150])
            found.verify()
    assert store.proxy.requests > 100
    (copy,) = (tmp_path / ".cache/mt/objects").iterdir()
    assert copy.read_bytes() == (tmp_path / "corpus.idx").read_bytes()


def test_an_object_that_changes_is_named_and_its_index_is_read_anew(store, tmp_path):
    for ending, content in written(tmp_path, DOCUMENTS):
        store.put(f"new/corpus{ending}", content)
    found = IndexedDataset("s3://bucket/new/corpus")
    others = [document + 1 for document in DOCUMENTS]
    (tmp_path / "other").mkdir()
    for ending, content in written(tmp_path / "other", others):
        store.put(f"new/corpus{ending}", content)
    with pytest.raises(DataFileError, match=r"s3://bucket/new/corpus\.bin: has changed while"):
        found[3]
    np.testing.assert_array_equal(IndexedDataset("s3://bucket/new/corpus")[3], others[3])
    assert len(list((tmp_path / ".cache/mt/objects").iterdir())) == 1


def test_documents_of_objects_are_those_of_files_though_requests_fail(store, tmp_path):
    import gzip

    lines = b"".join(b'{"text": "line %d %s"}\n' % (n, b"x" * (n % 70)) for n in range(900))
    for name, content in (
        ("a.jsonl", lines),
        ("b/c.jsonl.gz", gzip.compress(lines)),
        ("b/d.txt", b"one document"),
    ):
        path = tmp_path / "docs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        store.put(f"docs/{name}", content)
    store.proxy.fault = failing(0.1, 1)
    for source, local, glob in (
        ("s3://bucket/docs", "docs", "**/*"),
        ("s3://bucket/docs/", "docs", "**/*.jsonl"),
        ("s3://bucket/docs/a.jsonl", "docs/a.jsonl", "**/*"),
        ("s3://bucket/docs/b/*", "docs/b", "**/*"),
        (f"file://{tmp_path}/docs", "docs", "**/*"),
    ):
        found = read_documents(source, glob=glob)
        expected = read_documents(tmp_path / local, glob=glob)
        assert found.total_bytes == expected.total_bytes
        assert [d.text for d in found] == [d.text for d in expected], source


def test_one_message_names_object_and_cause(store):
    store.put("bad/a.jsonl", b'{"text": "a"}\n' * 1000)
    for fault, cause in (("error", "503"), ("cut", "")):
        store.proxy.fault = lambda request, fault=fault: fault if request.command == "GET" else None
        with pytest.raises(
            DataFileError, match=r"s3://bucket/bad/a\.jsonl: can't be read, "
        ) as one:
            list(read_documents("s3://bucket/bad/a.jsonl"))
        assert f"after {objects.TRIES} tries: " in str(one.value)
        assert cause in str(one.value)
        assert "\n" not in str(one.value)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("s3://bucket/none", "s3://bucket/none: no such object, and no object under this prefix"),
        ("s3://bucket/some/*.gz", "no object under this prefix matches"),
    ],
)
def test_what_is_not_there_is_said(store, source, text):
    store.put("some/a.txt", b"a")
    with pytest.raises((DataError, FileNotFoundError), match=text.replace("*", r"\*")):
        read_documents(source)


def test_a_missing_pair_is_a_missing_file(store):
    with pytest.raises(FileNotFoundError, match=r"s3://bucket/none\.idx") as error:
        IndexedDataset("s3://bucket/none")
    assert isinstance(error.value, FileError)


@pytest.mark.parametrize(
    ("path", "glob", "fits"),
    [
        ("a.txt", "**/*", True),
        ("b/c/a.txt", "**/*.txt", True),
        ("b/c/a.txt", "*.txt", False),
        ("b/a.txt", "?/a.*", True),
        ("b/c/a.txt", "b/**/a.txt", True),
    ],
)
def test_globs_are_those_of_folders(path, glob, fits):
    assert _matches(path.split("/"), glob.split("/")) is fits


def test_a_store_in_memory_serves_objects():
    import obstore

    memory = obstore.store.MemoryStore()
    obstore.put(memory, "a", bytes(range(100)))
    meta = obstore.head(memory, "a")
    found = objects._object("memory:///a", memory, meta)
    with found.open() as file:
        file.seek(-3, 2)
        assert file.read() == bytes((97, 98, 99))
        assert file.read() == b""
    obstore.put(memory, "a", bytes(100))
    with pytest.raises(DataFileError, match="memory:///a: has changed"):
        found.read(0, 4)
