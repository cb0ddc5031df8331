"""Tar members: places, refusal of hostile ones, detection of damage, and a stored index."""

import bz2
import gzip
import lzma
import os
import resource
import tarfile
import time

import numpy as np
import pytest
from mt_data import DataFileError
from mt_files import FileError
from mt_multimodal import TarIndex, open_images
from mt_multimodal import tar_index as module


def members_of(draw, count):
    """Names of any length, in folders, of other letters; contents of any size, and at blocks."""
    for number in range(count):
        folder = "".join(draw.choice(list("aé/.")) for _ in range(draw.integers(0, 180)))
        size = int(draw.choice([0, 1, 511, 512, 513, draw.integers(0, 5000)]))
        yield f"{folder}x{number}.Cls.TXT", draw.bytes(size)


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("seed", [0, 1])
def test_any_member_of_a_drawn_tar_is_read_by_number(tmp_path, made, format, seed):
    draw = np.random.default_rng(seed)
    members = list(members_of(draw, 40))
    path = made.write_tar(tmp_path / "a.tar", members, format=format)
    for index in (TarIndex(path), TarIndex(path)):  # the second reads the index
        for number in draw.permutation(len(members)).tolist():
            name, content = members[number]
            assert (index.name(number), index.read(number)) == (name, content)
            assert index.find(name) == number
        index.verify()
    assert index.index_path == tmp_path / "a.tar.index"
    assert TarIndex(path, tmp_path / "kept").fingerprint == index.fingerprint


def test_members_with_a_key_in_common_are_a_sample(tmp_path, made):
    names = ["d/1.jpg", "d/1.json", "README", "d/2.seg.PNG", "e/2.jpg", ".x.jpg"]
    index = TarIndex(made.write_tar(tmp_path / "a.tar", [(name, b"") for name in names]))
    found = [(index.key(number), index.sample(number)) for number in range(index.num_samples)]
    assert found == [
        ("d/1", {"jpg": 0, "json": 1}),
        ("d/2", {"seg.png": 3}),
        ("e/2", {"jpg": 4}),
    ]
    made.write_tar(tmp_path / "b.tar", [("1.jpg", b""), ("2.jpg", b""), ("1.json", b"")])
    with pytest.raises(DataFileError, match="one behind the other"):
        TarIndex(tmp_path / "b.tar")


def special(kind, **fields):
    member = tarfile.TarInfo("x.txt")
    member.type = kind
    for name, value in fields.items():
        setattr(member, name, value)
    return member.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


def header(content=b"", **fields):
    member = tarfile.TarInfo("x.txt")
    member.size = len(content)
    for name, value in fields.items():
        setattr(member, name, value)
    return member.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)


def pax(*records):
    lines = b"".join(b"%d %s\n" % (len(each) + 4, each) for each in records)
    return header(lines, type=b"x") + header(b"12")


HOSTILE = {
    "a link": special(tarfile.LNKTYPE, linkname="/etc/passwd"),
    "a symbolic link": special(tarfile.SYMTYPE, linkname="../../x"),
    "a device": special(tarfile.CHRTYPE, devmajor=1, devminor=3),
    "a FIFO": special(tarfile.FIFOTYPE),
    "a sparse file": special(b"S"),
    "an unknown kind": special(b"Q"),
    "a sparse file by pax": pax(b"GNU.sparse.major=1"),
    "a size beyond the end": header(size=10**6),
    "a size beyond 8 GiB": header(size=1 << 60),
    "a size of pax beyond the end": pax(b"size=99999"),
    "no size of pax": pax(b"size=-5"),
    "a pax record that is cut": header(b"99 path=x\n", type=b"x") + header(),
    "a name that is too long": header(b"a" * 5000, type=b"L") + header(),
    "a name twice": header(b"1") + header(b"2"),
    "no name": header(name=""),
    "a wrong checksum": bytes([header()[0] ^ 1]) + header()[1:],
    "no tar": b"\x89PNG" * 300,
    "a cut member": header(b"1" * 700)[:900],
    "bytes behind the last block": header(b"1") + b"rest",
    "a header alone": header(b"99 path=x\n"[:0], type=b"L"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_file_of_its_own_is_refused(tmp_path, what):
    (tmp_path / "a.tar").write_bytes(HOSTILE[what])
    with pytest.raises(DataFileError, match=r"a\.tar"):
        TarIndex(tmp_path / "a.tar")
    assert os.listdir(tmp_path) == ["a.tar"]


@pytest.mark.parametrize(
    ("name", "library"), [("a.tar", gzip), ("a.tgz", gzip), ("a.tar.bz2", bz2), ("a.tar.xz", lzma)]
)
def test_a_compressed_tar_says_so(tmp_path, made, name, library):
    content = made.write_tar(tmp_path / "b.tar", [("1.txt", b"a")]).read_bytes()
    (tmp_path / name).write_bytes(library.compress(content))
    with pytest.raises(DataFileError, match="is compressed"):
        open_images(tmp_path / name)


def test_names_that_traverse_are_only_names(tmp_path, made):
    names = ["../../etc/cron.d/x.txt", "/abs.txt", "a/../b.txt"]
    index = TarIndex(made.write_tar(tmp_path / "a.tar", [(name, b"1") for name in names]))
    assert [index.name(number) for number in range(3)] == names
    assert [index.read(number) for number in range(3)] == [b"1"] * 3
    assert sorted(os.listdir(tmp_path)) == ["a.tar", "a.tar.index"]


def test_what_is_no_regular_file_is_no_tar(tmp_path):
    os.mkfifo(tmp_path / "a.tar")
    with pytest.raises(FileError):
        TarIndex(tmp_path / "a.tar")


def test_every_flipped_bit_of_content_and_index_is_found(tmp_path, made):
    draw = np.random.default_rng(0)
    members = [(f"{n}.txt", draw.bytes(200)) for n in range(5)]
    path = made.write_tar(tmp_path / "a.tar", members)
    index = TarIndex(path)
    whole, stored = path.read_bytes(), index.index_path.read_bytes()
    for _ in range(300):
        place, bit = int(draw.integers(len(stored))), 1 << int(draw.integers(8))
        damaged = bytearray(stored)
        damaged[place] ^= bit
        index.index_path.write_bytes(damaged)
        try:
            again = TarIndex(path)
        except DataFileError as error:
            assert "a.tar.index" in str(error)  # noqa: PT017 - a flip in the digests' head is seen
            continue
        # A flip of the size or the version makes an index of another tar, which is made again.
        assert again.fingerprint == index.fingerprint
        assert index.index_path.read_bytes() == stored
    for _ in range(300):
        member, bit = int(draw.integers(5)), 1 << int(draw.integers(8))
        damaged = bytearray(whole)
        damaged[index._columns.begins[member] + int(draw.integers(200))] ^= bit
        path.write_bytes(damaged)
        with pytest.raises(DataFileError, match=f"{member}.txt"):
            index.read(member)
    index.index_path.write_bytes(stored)
    path.write_bytes(whole[:512])
    with pytest.raises(DataFileError, match=r"a\.tar"):
        index.read(3)


def test_a_tar_that_was_written_anew_is_indexed_anew(tmp_path, made):
    path = made.write_tar(tmp_path / "a.tar", [("1.txt", b"1")])
    before = TarIndex(path).fingerprint
    made.write_tar(path, [("1.txt", b"2")])
    again = TarIndex(path)
    assert again.read(0) == b"2"
    assert again.fingerprint != before


def test_a_folder_for_reading_alone_keeps_the_index_in_memory(tmp_path, made, monkeypatch):
    path = made.write_tar(tmp_path / "a.tar", [("1.txt", b"1")])

    def refuse(*_):
        raise FileError(path, "can't be written")

    monkeypatch.setattr(module.mt_files, "write_file", refuse)
    index = TarIndex(path)
    assert index.index_path is None
    assert index.read(0) == b"1"
    with pytest.raises(FileError):
        TarIndex(path, tmp_path / "named")


@pytest.mark.campaign
def test_a_tar_of_a_million_members_is_indexed_in_bounded_memory_and_opens_in_a_second(tmp_path):
    path, head = tmp_path / "many.tar", bytearray(tarfile.TarInfo("0000000.txt").tobuf())
    head[124:136] = b"%011o\0" % 1
    rest = sum(head) - sum(head[:7]) - sum(head[148:156]) + 8 * ord(" ")
    with path.open("wb") as file:
        for number in range(1_000_000):
            name = b"%07d" % number
            head[:7], head[148:156] = name, b"%06o\0 " % (rest + sum(name))
            file.write(head + b"x" + bytes(511))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert len(TarIndex(path)) == 1_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # in KiB
    begin = time.process_time()
    index = TarIndex(path)
    assert time.process_time() - begin < 1
    assert index.read(999_999) == b"x"
