"""Tokens, documents and tars of an object store that fails one request in ten."""

import io
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from mt_data import DataError, IndexedDataset, IndexedWriter, read_documents
from mt_files import FileError, ObjectError, ObjectStore, ObjectTries, objects
from mt_multimodal import TarIndex
from mt_testing import unsteady_store


@pytest.fixture(scope="module")
def server():
    with unsteady_store() as proxy:
        yield proxy


@pytest.fixture
def store(server, monkeypatch, tmp_path):
    """Return the bucket; a test lets requests fail through its `proxy`."""
    monkeypatch.setattr(objects, "ObjectTries", partial(ObjectTries, first_wait=0.001))
    monkeypatch.setattr(objects, "BLOCK", 1 << 12)  # many requests
    monkeypatch.setattr("mt_data.storage.indexed.BLOCK", 1 << 12)
    home = {"HOME": str(tmp_path)}  # of the copies of indexes
    for name, value in {**server.variables, **home}.items():
        monkeypatch.setenv(name, value)
    server.requests.clear()
    yield ObjectStore("s3://bucket")
    server.fault = None


def written(folder: Path, documents):
    with IndexedWriter(folder / "corpus", np.int32) as writer:
        for document in documents:
            writer.add_document(document)
    return [(ending, Path(f"{folder}/corpus{ending}").read_bytes()) for ending in ENDINGS]


ENDINGS = (".bin", ".idx", ".json")
DOCUMENTS = [np.arange(number, number + 900) for number in range(40)]


def test_token_files_give_the_same_tokens_though_requests_fail(server, store, tmp_path):
    for ending, content in written(tmp_path, DOCUMENTS):
        store.put(f"data/corpus{ending}", content)
    server.fail_some(0.1, seed=0)
    local = IndexedDataset(tmp_path / "corpus")
    # As text, and as a `Path` writes it.
    for prefix in ("s3://bucket/data/corpus", Path("s3://bucket/data/corpus")):
        with IndexedDataset(prefix) as found:
            assert found.fingerprint == local.fingerprint
            for number, document in enumerate(DOCUMENTS):
                np.testing.assert_array_equal(found[number], document)
            np.testing.assert_array_equal(found.read(7, 100, 50), DOCUMENTS[7][100:150])
            found.verify()
    assert len(server.requests) > 100
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
    with pytest.raises(ObjectError, match=r"s3://bucket/new/corpus\.bin: has changed while"):
        found[3]
    np.testing.assert_array_equal(IndexedDataset("s3://bucket/new/corpus")[3], others[3])
    assert len(list((tmp_path / ".cache/mt/objects").iterdir())) == 1


def test_documents_of_objects_are_those_of_files_though_requests_fail(server, store, tmp_path):
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
    server.fail_some(0.1, seed=1)
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


def test_one_message_names_object_and_cause(server, store):
    store.put("bad/a.jsonl", b'{"text": "a"}\n' * 1000)
    for fault, cause in (("error", "503"), ("cut", "")):
        server.fault = lambda method, _, fault=fault: fault if method == "GET" else None
        with pytest.raises(
            ObjectError, match=r"s3://bucket/bad/a\.jsonl: the store fails, after 8 tries: "
        ) as one:
            list(read_documents("s3://bucket/bad/a.jsonl", on_error=print))
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


def test_a_tar_is_read_by_range_though_requests_fail(server, store, tmp_path):
    members = [(f"{number}.txt", bytes([number]) * 1000) for number in range(20)]
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    store.put("tars/a.tar", (tmp_path / "a.tar").read_bytes())
    server.fail_some(0.1, seed=0)
    index = TarIndex("s3://bucket/tars/a.tar", tmp_path / "kept")
    before = server.sent
    for number in (19, 3, 11):
        assert (index.name(number), index.read(number)) == members[number]
    assert 3000 <= server.sent - before < 9000  # some of the answers were lost
    assert TarIndex("s3://bucket/tars/a.tar", tmp_path / "kept").fingerprint == index.fingerprint
    store.put("tars/a.tar", b"x")
    with pytest.raises(ObjectError, match="changed"):
        index.read(0)
