import os
import signal
import subprocess
import sys
import time

import pytest
from mt_files import FileError, remove_temporaries, sync, write_file, writing


def names(folder):
    return sorted(os.listdir(folder))


def test_a_file_is_made_and_replaced(tmp_path):
    path = tmp_path / "file"
    write_file(path, b"one", memoryview(b" two"))
    assert path.read_bytes() == b"one two"
    write_file(str(path), "drei ü")
    assert path.read_text() == "drei ü"
    assert names(tmp_path) == ["file"]


def test_a_block_that_raises_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_file(path, b"old")

    def interrupted():
        with writing(path) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_an_error_of_the_block_is_not_taken_for_one_of_writing(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, writing(tmp_path / "file"):
        (tmp_path / "missing").read_bytes()
    assert not isinstance(caught.value, FileError)


def test_a_link_at_the_target_is_replaced_and_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    (tmp_path / "file").symlink_to(victim)
    write_file(tmp_path / "file", b"new")
    assert victim.read_text() == "as it was"
    assert not (tmp_path / "file").is_symlink()


def test_the_new_file_has_the_rights_that_the_umask_leaves(tmp_path):
    old = os.umask(0o027)
    try:
        write_file(tmp_path / "file", b"")
    finally:
        os.umask(old)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_a_long_name_has_room_for_its_temporary(tmp_path):
    path = tmp_path / ("ü" * 127)
    write_file(path, b"x")
    assert path.read_bytes() == b"x"


@pytest.mark.parametrize("target", ["missing/file", "folder"])
def test_what_cannot_be_written_is_named(tmp_path, target):
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileError, match=f"{target}: cannot write it"):
        write_file(tmp_path / target, b"")
    assert names(tmp_path) == ["folder"]


def test_a_full_disk_is_said_with_the_room_there_is(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match=r"No space left on device; \d+ bytes are free") as caught:
        write_file(tmp_path / "file", b"x")
    assert caught.value.errno == 28
    assert names(tmp_path) == []


def test_sync_names_what_is_missing(tmp_path):
    sync(tmp_path)
    with pytest.raises(FileNotFoundError, match="missing: cannot sync"):
        sync(tmp_path / "missing")


WRITER = """
import sys, time
from mt_files import writing
with writing(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def writer(tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path / "file")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def test_what_a_killed_writer_left_is_removed_and_a_live_one_is_left_alone(tmp_path, writer):
    (temporary,) = names(tmp_path)
    assert remove_temporaries(tmp_path) == []
    assert names(tmp_path) == [temporary]
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert [path.name for path in remove_temporaries(tmp_path)] == [temporary]
    assert names(tmp_path) == []


def test_only_temporaries_are_removed(tmp_path):
    hexadecimal = "0" * 32
    (tmp_path / f".x.tmp-{hexadecimal}").mkdir()
    (tmp_path / f"x.tmp-{hexadecimal}").write_text("")
    (tmp_path / ".x.tmp-12").write_text("")
    (tmp_path / f".link.tmp-{hexadecimal}").symlink_to(tmp_path / "x")
    assert remove_temporaries(tmp_path) == []
    assert remove_temporaries(tmp_path / "missing") == []


def test_a_reader_sees_the_old_content_or_the_new(tmp_path):
    path = tmp_path / "file"
    write_file(path, b"a" * 100_000)
    end = time.monotonic() + 0.5
    if (child := os.fork()) == 0:
        for turn in range(10**6):
            write_file(path, (b"ab"[turn % 2 : turn % 2 + 1]) * 100_000)
            if time.monotonic() > end:
                os._exit(0)
    seen = set()
    while time.monotonic() < end:
        content = path.read_bytes()
        assert len(content) == 100_000
        seen.add(content[:1])
        assert content == content[:1] * 100_000
    assert os.waitpid(child, 0)[1] == 0
    assert seen == {b"a", b"b"}
