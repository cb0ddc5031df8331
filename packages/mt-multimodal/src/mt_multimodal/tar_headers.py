"""Members of tar files (POSIX.1-2001 ustar and pax, and GNU's long names): names and places."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from mt_data import DataFileError

from mt_multimodal.ranges import Ranges, Stream

BLOCK = 512
DIGEST = 16
_MOST_NAME, _MOST_PAX = 1 << 12, 1 << 16
_EXTENSIONS = (b"x", b"g", b"L", b"K")
# The first bytes of gzip, bzip2, xz and Zstandard.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")
_FILES = (b"0", b"\0", b"7")
_REFUSED = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a FIFO",
    b"S": "a sparse file",
    b"M": "a part of a file of several volumes",
}


@dataclass(frozen=True, slots=True)
class Member:
    """A regular file in a tar.

    Attributes:
        name: Name, which is never used as a path.
        begin: Place of its first byte in the tar.
        size: Number of bytes.
        digest: First 16 bytes of the SHA-256 of its content.
    """

    name: str
    begin: int
    size: int
    digest: bytes


def read_members(ranges: Ranges) -> Iterator[Member]:
    """Read a tar from its beginning to its end, and yield its regular files; folders are left out.

    Raises:
        DataFileError: The file is no tar or ends early, a size goes beyond its end, two members
            have the same name, or there is a link, a device, a sparse file or another special
            member.
    """
    if ranges.read(0, min(ranges.size, 6)).startswith(_COMPRESSED):
        text = "is compressed, and has no places to read from; decompress it, as with gzip -d"
        raise DataFileError(ranges.name, text)
    stream, names, own = Stream(ranges), set[str](), dict[str, str]()
    while stream.at + BLOCK <= ranges.size:
        place, block = stream.at, stream.take(BLOCK)
        if block == bytes(BLOCK):
            return
        header = _Header(ranges, place, block)
        if header.kind in _EXTENSIONS:
            own |= _told(stream, header)
            continue
        size = header.number(own["size"]) if "size" in own else header.size
        name = own["path"] if "path" in own else header.own_name()
        own = {}
        header.check_fits(size)
        if header.kind == b"5" or (header.kind == b"\0" and name.endswith("/")):
            stream.at += -(-size // BLOCK) * BLOCK
            continue
        header.check_file(name)
        if name in names:
            raise header.error(f"{name!r} is there twice; each member needs a name of its own")
        names.add(name)
        begin, digest = stream.at, hashlib.sha256()
        for piece in stream.pieces(size):
            digest.update(piece)
        yield Member(name, begin, size, digest.digest()[:DIGEST])
        stream.at += -size % BLOCK  # the last padding may be missing
    if own:
        raise DataFileError(ranges.name, "ends behind a header that has no member")
    if stream.at < ranges.size:
        rest = ranges.size - stream.at
        raise DataFileError(ranges.name, f"byte {stream.at}: {rest} bytes are no header of a tar")


def _told(stream: Stream, header: _Header) -> dict[str, str]:
    """Return the path and the size that an extension gives for the next member."""
    content = _extension(stream, header)
    if header.kind == b"K":  # the target of a link, which is refused
        return {}
    if header.kind == b"L":
        return {"path": _text(header, content.rstrip(b"\0"))}
    found = _pax(header, content)
    if header.kind == b"g" and found:
        raise header.error(f"sets {', '.join(sorted(found))} for all members")
    return found


class _Header:
    """A header of 512 bytes with a correct checksum."""

    def __init__(self, ranges: Ranges, place: int, block: bytes) -> None:
        self._ranges, self.place = ranges, place
        wanted = self.number(_octal(block[148:156]))
        # The checksum's own field counts as spaces.
        if sum(block) - sum(block[148:156]) + 8 * ord(" ") != wanted:
            raise self.error("is no header of a tar: its checksum is wrong")
        self.kind = block[156:157]
        if block[124] & 0x80:  # base 256, for sizes beyond 8 GiB
            self.size = int.from_bytes(bytes([block[124] & 0x7F]) + block[125:136], "big")
        else:
            self.size = self.number(_octal(block[124:136]))
        self._block = block

    def own_name(self) -> str:
        """Return the name in this header; a longer name in an extension takes precedence."""
        raw = self._block[:100].split(b"\0")[0]
        is_posix = self._block[257:263] == b"ustar\0"
        prefix = self._block[345:500].split(b"\0")[0] if is_posix else b""
        return _text(self, prefix + b"/" + raw if prefix else raw)

    def number(self, text: str) -> int:
        """Return the number that a header writes in decimal digits."""
        if not text.isascii() or not text.isdigit() or len(text) > 20:
            raise self.error(f"{text[:30]!r} is no number")
        return int(text)

    def check_fits(self, size: int) -> None:
        """Refuse a size that goes beyond the end of the tar."""
        if size > self._ranges.size - self.place - BLOCK:
            raise self.error(f"a member of {size} bytes goes beyond the end of the tar")

    def check_file(self, name: str) -> None:
        """Raise an error unless the member is a regular file with a name."""
        if self.kind not in _FILES:
            what = _REFUSED.get(self.kind, f"of the unknown kind {self.kind!r}")
            raise self.error(f"{name!r} is {what}; only regular files are read")
        if not name:
            raise self.error("a member has no name")

    def error(self, problem: str) -> DataFileError:
        """Return the error for a problem in this header."""
        return DataFileError(self._ranges.name, f"byte {self.place}: {problem}")


def _octal(field: bytes) -> str:
    """Return the decimal digits of an octal field; the quoted field if it is not octal."""
    digits = field.strip(b" \0")
    try:
        return str(int(digits or b"0", 8)) if digits.isdigit() or not digits else repr(digits)
    except ValueError:
        return repr(digits)


def _extension(stream: Stream, header: _Header) -> bytes:
    """Return the content of a header that describes the next member."""
    most = _MOST_NAME if header.kind in (b"L", b"K") else _MOST_PAX
    if header.size > most:
        raise header.error(f"describes a member in {header.size} bytes; at most {most} are read")
    padded = -(-header.size // BLOCK) * BLOCK
    header.check_fits(padded)
    return stream.take(padded)[: header.size]


def _pax(header: _Header, content: bytes) -> dict[str, str]:
    """Return the path and the size of a pax header, whose records are `length key=value`."""
    found, at = {}, 0
    while at < len(content):
        digits, space, _ = content[at : at + 8].partition(b" ")
        count = header.number(digits.decode("latin-1")) if space else 0
        record = content[at : at + count]
        key, equals, value = record[len(digits) + 1 : -1].partition(b"=")
        if not equals or len(record) != count or not record.endswith(b"\n"):
            raise header.error("has a pax record that is not `length key=value`")
        if key.startswith(b"GNU.sparse"):
            raise header.error("describes a sparse file; only regular files are read")
        if key in (b"path", b"size"):
            found[key.decode()] = _text(header, value)
        at += count
    return found


def _text(header: _Header, raw: bytes) -> str:
    if len(raw) > _MOST_NAME or b"\0" in raw:
        raise header.error(f"has a name of {len(raw)} bytes, or one with a zero byte")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise header.error(f"has the name {raw[:60]!r}, which is not UTF-8") from None
