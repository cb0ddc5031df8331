import errno
import fcntl
import os
import subprocess
import sys

import pytest
from mt_files import FileError, FolderLock, LockedError

HOLDER = """
import sys
from mt_files import FolderLock
with FolderLock(sys.argv[1], purpose="training", shared=sys.argv[2] == "shared"):
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def hold(tmp_path):
    started = []

    def start(kind):
        command = [sys.executable, "-c", HOLDER, str(tmp_path), kind]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(command, **pipes)
        started.append(process)
        assert process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_second_process_is_told_who_holds_the_lock(tmp_path, hold):
    process = hold("exclusive")
    for shared in (False, True):
        lock = FolderLock(tmp_path, purpose="x", shared=shared)
        with pytest.raises(LockedError, match=rf"process {process.pid} on \S+ \(training, since"):
            lock.__enter__()
        assert not lock.held


def test_a_holder_that_has_not_signed_yet_is_waited_for(tmp_path, hold, monkeypatch):
    process = hold("exclusive")
    signature = (tmp_path / ".lock").read_bytes()
    (tmp_path / ".lock").write_bytes(b"")
    monkeypatch.setattr("time.sleep", lambda _: (tmp_path / ".lock").write_bytes(signature))
    with (
        pytest.raises(LockedError, match=f"process {process.pid} "),
        FolderLock(tmp_path, purpose="x"),
    ):
        pass


@pytest.mark.parametrize("kind", ["exclusive", "shared"])
def test_the_lock_ends_with_a_killed_process(tmp_path, hold, kind):
    process = hold(kind)
    process.kill()
    process.wait()
    with FolderLock(tmp_path, purpose="x") as lock:
        assert lock.held


def test_readers_share_and_keep_a_writer_out(tmp_path, hold):
    hold("shared")
    with FolderLock(tmp_path, purpose="x", shared=True) as lock:
        assert lock.held
    with pytest.raises(LockedError, match="is being read"):
        FolderLock(tmp_path, purpose="x").__enter__()


def test_a_lock_is_given_back_and_taken_again(tmp_path):
    lock = FolderLock(tmp_path, purpose="x")
    for _ in range(2):
        with lock:
            assert lock.held
        assert not lock.held
    assert os.listdir(tmp_path) == [".lock"]


def test_two_locks_of_one_process_exclude_each_other(tmp_path):
    with FolderLock(tmp_path, purpose="one"), pytest.raises(LockedError, match="one, since"):
        FolderLock(tmp_path, purpose="two").__enter__()


def test_locks_of_other_names_are_others(tmp_path):
    other = FolderLock(tmp_path, purpose="b", name=".b.lock")
    with FolderLock(tmp_path, purpose="a", name=".a.lock"), other:
        assert other.held


def test_a_forked_child_that_lives_on_does_not_keep_a_lock_given_back(tmp_path):
    read, write = os.pipe()
    with FolderLock(tmp_path, purpose="parent"):
        if (child := os.fork()) == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
    with FolderLock(tmp_path, purpose="again") as lock:
        assert lock.held
    os.close(write)
    os.waitpid(child, 0)
    os.close(read)


def test_a_lock_file_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "victim").write_text("as it was")
    (tmp_path / ".lock").symlink_to("victim")
    with pytest.raises(FileError, match="cannot lock it"):
        FolderLock(tmp_path, purpose="x").__enter__()
    assert (tmp_path / "victim").read_text() == "as it was"


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(FileError, match="missing"):
        FolderLock(tmp_path / "missing", purpose="x").__enter__()


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with FolderLock(tmp_path, purpose="x") as lock:
        assert not lock.held


def test_nonsense_in_the_lock_file_is_no_traceback(tmp_path, hold):
    hold("exclusive")
    for content in (b"", b"[]", b"\xff", b'{"pid": 1}', b"[" * 5000):
        (tmp_path / ".lock").write_bytes(content)
        with pytest.raises(LockedError, match="another process"):
            FolderLock(tmp_path, purpose="x").__enter__()
