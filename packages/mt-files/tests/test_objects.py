"""Objects in a store in memory, whose answers get lost."""

from pathlib import Path

import pytest
from mt_files import (
    FileError,
    MissingFileError,
    ObjectError,
    ObjectStore,
    ObjectTries,
    StoredObject,
    absolute_path,
    object_url,
)
from mt_files.folder import check_free

TRIES = ObjectTries(count=3, first_wait=0.0)


class Unsteady(ObjectStore):
    """A store that loses the answers of some requests after it has carried them out."""

    def __init__(self):
        super().__init__("memory://", TRIES)
        self.lost = 0

    def _tried(self, path, action):
        def unsteady():
            result = action()
            if self.lost:
                self.lost -= 1
                raise OSError("the answer is lost")
            return result

        return super()._tried(path, unsteady)


@pytest.fixture
def store():
    return Unsteady()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_put_with_a_condition_finds_its_own_object(store, lost):
    store.lost = lost
    version = store.put_if("a", b"first 1", None)
    assert version is not None
    store.lost = lost
    assert store.put_if("a", b"other 2", None) is None
    store.lost = lost
    newer = store.put_if("a", b"second 3", version)
    assert newer is not None
    assert newer != version
    assert store.put_if("a", b"late 4", version) is None
    assert store.get("a")[0] == b"second 3"


def test_objects_are_read_by_range_listed_and_deleted(store):
    store.put("a/b/1", b"0123456789")
    store.put("a/2", b"x")
    store.lost = 2
    assert bytes(store.read("a/b/1", 3, 4)) == b"3456"
    first, info = store.start("a/b/1", 4)
    assert (bytes(first), info.size) == (b"0123", 10)
    assert bytes(store.start("a/2", 4)[0]) == b"x"
    folders, objects = store.names("a")
    assert (folders, [info.path for info in objects]) == (["b"], ["a/2"])
    assert [info.path for info in store.list("a")] == ["a/2", "a/b/1"]
    assert store.has_any("a/b")
    store.delete(["a/b/1"])
    assert not store.has_any("a/b")
    assert store.head("a/b/1") is None
    with pytest.raises(MissingFileError, match="a/b/1: no such object"):
        store.get("a/b/1")


def test_an_object_is_read_as_a_file_and_copied_though_answers_are_lost(store, tmp_path):
    store.put("a", bytes(range(100)))
    found = StoredObject(store=store, info=store.head("a"))
    store.lost = 2
    with found.open(first=memoryview(b"\0\1")) as file:
        assert file.read(3) == b"\0\1\2"
        file.seek(-3, 2)
        assert file.read() == bytes((97, 98, 99))
        assert file.read() == b""
        with pytest.raises(FileError, match="before the start"):
            file.seek(-1)
    assert found.cached(tmp_path).read_bytes() == found.content(limit=100) == bytes(range(100))
    with pytest.raises(ObjectError, match="a: has 100 bytes; at most 99 are read"):
        found.content(limit=99)


def test_an_object_is_read_in_one_version_alone(store, tmp_path):
    store.put("a", bytes(range(100)))
    found = StoredObject(store=store, info=store.head("a"))
    copy = found.cached(tmp_path)
    store.put("a", bytes(100))
    with pytest.raises(ObjectError, match="a: has changed while it is read"):
        found.read(0, 4)
    assert found.cached(tmp_path) == copy  # its own version is there
    StoredObject(store=store, info=store.head("a")).cached(tmp_path)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [bytes(100)]


def test_a_store_that_stays_away_is_named(store):
    store.lost = 3
    with pytest.raises(ObjectError, match="after 3 tries: the answer is lost"):
        store.put("a", b"")


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("s3://bucket/a", "s3://bucket/a"),
        (Path("gs://bucket/a"), "gs://bucket/a"),
        ("/s3://bucket", None),
        ("http://host/a", None),
    ],
)
def test_urls_of_stores_are_told_from_paths(path, url):
    assert object_url(path) == url


def test_a_path_for_another_process_begins_at_the_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("a", Path("a"), f"file://{tmp_path}/a", tmp_path / "a"):
        assert absolute_path(path) == str(tmp_path / "a")
    assert absolute_path(Path("s3://bucket/a")) == "s3://bucket/a"


def test_a_new_folder_is_not_made_in_a_store():
    with pytest.raises(FileError, match="s3://bucket/a: is in an object store"):
        check_free(Path("s3://bucket/a"))
