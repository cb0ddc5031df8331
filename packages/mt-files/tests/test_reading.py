import os
import pickle
import socket

import pytest
from mt_files import (
    FileError,
    MissingFileError,
    open_file,
    parse_json,
    read_bytes,
    read_json,
    read_text,
)


@pytest.fixture
def inside(tmp_path):
    folder = tmp_path / "inside"
    folder.mkdir()
    (tmp_path / "outside.txt").write_text("secret")
    (folder / "plain.txt").write_text("text")
    return folder


def test_reads_a_regular_file(inside):
    assert read_bytes(inside / "plain.txt", limit=4) == b"text"
    assert read_text(str(inside / "plain.txt"), limit=4, within=inside) == "text"
    with open_file(inside / "plain.txt") as file:
        assert file.read() == b"text"


def test_nothing_but_a_regular_file_is_opened(inside):
    os.mkfifo(inside / "fifo")
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(os.path.relpath(inside / "socket"))
    (inside / "zero").symlink_to("/dev/zero")
    for name, kind in {
        "fifo": "FIFO",
        "socket": "socket",
        "zero": "device",
        ".": "directory",
    }.items():
        for read in (open_file, lambda path: read_bytes(path, limit=9)):
            with pytest.raises(FileError, match=kind):
                read(inside / name)
    bound.close()


def test_a_link_may_lead_anywhere_unless_a_folder_is_given(inside):
    link = inside / "link"
    link.symlink_to(inside.parent / "outside.txt")
    assert read_text(link, limit=9) == "secret"
    with pytest.raises(FileError, match="leads out of"):
        read_text(link, limit=9, within=inside)


@pytest.mark.parametrize("name", ["../outside.txt", "below/link", "/etc/passwd"])
def test_no_name_leads_out_of_the_folder(inside, name):
    (inside / "below").symlink_to(inside.parent)
    (inside / "link").symlink_to(inside.parent / "outside.txt")
    name = name.replace("link", "outside.txt")
    with pytest.raises(FileError, match="leads out of"):
        open_file(inside / name, within=inside)


def test_a_link_within_the_folder_is_followed(inside):
    (inside / "link").symlink_to("plain.txt")
    assert read_text(inside / "link", limit=9, within=inside) == "text"


def test_a_folder_whose_name_begins_alike_is_outside(inside):
    other = inside.with_name("inside-too")
    other.mkdir()
    (other / "file").write_text("")
    with pytest.raises(FileError, match="leads out of"):
        open_file(other / "file", within=inside)


def test_size_is_compared_before_memory_is_taken(inside):
    with open(inside / "sparse", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(FileError, match=f"{2**40} bytes; at most 100"):
        read_bytes(inside / "sparse", limit=100)


def test_a_file_without_a_size_is_bounded_too():
    with pytest.raises(FileError, match="grew beyond 10"):
        read_bytes("/proc/self/status", limit=10)


def test_what_is_missing_is_a_file_not_found(inside):
    for path in (inside / "none", inside / "plain.txt" / "below"):
        with pytest.raises(FileError):
            read_bytes(path, limit=1)
    with pytest.raises(FileNotFoundError, match="none: cannot read it: No such file"):
        read_bytes(inside / "none", limit=1)


def test_links_in_a_circle_and_impossible_names_are_errors(inside):
    (inside / "a").symlink_to("b")
    (inside / "b").symlink_to("a")
    for name in ("a", "nul\0byte", "x" * 5000):
        with pytest.raises(FileError):
            open_file(inside / name)


def test_errors_name_the_file_and_survive_pickling(inside):
    with pytest.raises(MissingFileError) as caught:
        open_file(inside / os.fsdecode(b"\xff"))
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.path == str(inside / os.fsdecode(b"\xff")) == caught.value.path
    assert "\\xff" in str(again)
    assert str(again).encode()


def test_a_text_that_can_be_no_path_is_refused(inside):
    """JSON may spell half a character, which no system call takes."""
    with pytest.raises(FileError, match=r"a\\ud800b: is no file name"):
        open_file(inside / "a\ud800b")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\xff", "not UTF-8"),
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"NaN", "NaN"),
        (b"[-Infinity]", "Infinity"),
        (b"1e999", "too large"),
        (b"9" * 5000, "5000 digits"),
        (b"[" * 10**6, "nested too deeply"),
        (b'{"a":' * 10**5, "nested too deeply"),
        (b"1 2", "not valid JSON"),
    ],
)
def test_only_strict_json_is_read(inside, content, why):
    (inside / "x.json").write_bytes(content)
    with pytest.raises(FileError, match=why) as caught:
        read_json(inside / "x.json", limit=10**7)
    assert len(str(caught.value)) < 500


def test_json_values_come_as_they_are(inside):
    (inside / "x.json").write_text(
        '{"a": [1, -2.5, 1e3, null, true, "é"], "b": 18446744073709551615}'
    )
    assert read_json(inside / "x.json", limit=999) == {
        "a": [1, -2.5, 1000.0, None, True, "é"],
        "b": 2**64 - 1,
    }
    assert parse_json("[]", name="line 3") == []
