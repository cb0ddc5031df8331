import hashlib
import json
import os
import random

import pytest
from mt_files import FileError, digest, known_sha256, sha256_file


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A file, whose changes count as settled at once."""
    monkeypatch.setattr(digest, "_SETTLED_NS", -1)
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(range(256)) * 40)
    return path


def counting(monkeypatch):
    calls = []
    real = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *a: calls.append(1) or real(*a))
    return calls


def test_digest_is_sha256(data):
    assert sha256_file(data) == hashlib.sha256(data.read_bytes()).hexdigest()


def test_a_remembered_digest_saves_reading(data, monkeypatch):
    cache = data.with_name("digests.json")
    first = sha256_file(data, cache=cache)
    calls = counting(monkeypatch)
    assert sha256_file(data, cache=cache) == first
    assert calls == []


def test_every_bit_flip_is_seen_through_the_cache(data):
    cache = data.with_name("digests.json")
    chance = random.Random(1)
    seen = {sha256_file(data, cache=cache)}
    for _ in range(20):
        status = data.stat()
        with open(data, "r+b") as file:
            at = chance.randrange(status.st_size)
            byte = os.pread(file.fileno(), 1, at)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << chance.randrange(8)]), at)
        os.utime(data, ns=(status.st_atime_ns, status.st_mtime_ns))  # as if nothing had happened
        found = sha256_file(data, cache=cache)
        assert found == hashlib.sha256(data.read_bytes()).hexdigest()
        seen.add(found)
    assert len(seen) == 21


def test_a_file_changed_just_now_is_not_remembered(tmp_path):
    path, cache = tmp_path / "data.bin", tmp_path / "digests.json"
    path.write_bytes(b"x")
    sha256_file(path, cache=cache)
    assert not cache.exists()


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"data.bin": 1}', b'{"data.bin": {"sha256": 5}}', b"\xff"]
)
def test_a_damaged_cache_is_as_none(data, content):
    cache = data.with_name("digests.json")
    cache.write_bytes(content)
    assert sha256_file(data, cache=cache) == hashlib.sha256(data.read_bytes()).hexdigest()
    assert json.loads(cache.read_text())["data.bin"]["size"] == data.stat().st_size


def test_a_cache_that_cannot_be_written_costs_time_only(data):
    assert sha256_file(data, cache=data.parent / "missing" / "digests.json") == sha256_file(data)


def test_a_fifo_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FileError, match="FIFO"):
        sha256_file(tmp_path / "fifo")


def test_the_digest_of_an_open_file_is_known_until_it_changes(data):
    cache = data.with_name("digests.json")
    with data.open("rb+") as file:
        assert known_sha256(file, data, cache=cache) is None
        assert known_sha256(file, data, cache=None) is None
        digest = sha256_file(data, cache=cache)
        assert known_sha256(file, data, cache=cache) == digest
        data.rename(data.with_name("older"))
        data.write_bytes(b"new")
        sha256_file(data, cache=cache)
        assert known_sha256(file, data, cache=cache) is None  # it is another file now
