"""Removal of metadata from image files, and refusal of parts that take a decoder too long.

Pillow reads metadata in Python loops, and copies as many bytes of an EXIF table as each entry
claims, so a small file can take most of a minute. Pillow gets the pixels alone; the orientation is
read here.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from mt_data import DataFileError

_PARTS = 1 << 16
_ENTRIES = 1 << 10
_ORIENTATION = 0x0112
_MOST_TURN = 8
# Scans times pixels of a progressive JPEG: 32 scans of 2^26 pixels. A small image counts as 2^16.
_MOST_SCANNED, _LEAST_PIXELS = 1 << 31, 1 << 16
_MARKER = re.compile(rb"\xff+([^\x00\xff])")
_ALONE = {0x01, *range(0xD0, 0xDA)}  # markers without a length
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_XMP = re.compile(rb"tiff:Orientation(?:=\"|>)([1-8])")
_XMP_JPEG, _XMP_PNG = b"http://ns.adobe.com/xap/1.0/\0", b"XML:com.adobe.xmp\0"
_EXIF = b"Exif\0\0"


def without_metadata(content: bytes, where: str, most_pixels: int) -> tuple[bytes, int]:
    """Return an image file with only the parts that its pixels need, and the orientation, 1 to 8.

    Args:
        content: The file; a file of an unknown format is returned unchanged.
        where: Place of the file, for messages.
        most_pixels: Largest number of pixels of the canvas that a decoder makes when it opens WEBP.

    Raises:
        DataFileError: The file is damaged, or has parts that would take a decoder too long.
    """
    reader = next((read for start, read in _READERS.items() if content.startswith(start)), None)
    if reader is None:
        return content, 1
    try:
        return reader(content, most_pixels)
    except (IndexError, struct.error):
        raise DataFileError(where, "is an image whose file is cut; use a whole one") from None
    except ValueError as error:
        raise DataFileError(where, f"is an image that {error}; save it anew") from None


def exif_orientation(exif: bytes) -> int:
    """Return the orientation in an EXIF table; 1 if it has none."""
    exif = exif.removeprefix(_EXIF)
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    try:
        if order is None:
            return 1
        (at,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, at)
        for entry in range(min(count, _ENTRIES)):
            tag, value = struct.unpack_from(f"{order}H6xH", exif, at + 2 + 12 * entry)
            if tag == _ORIENTATION:
                return value if 1 <= value <= _MOST_TURN else 1
    except struct.error:
        pass  # a damaged table has no orientation, as in other readers
    return 1


def xmp_orientation(xmp: bytes) -> int:
    """Return the orientation in an XMP text; 1 if it has none."""
    found = _XMP.search(xmp)
    return 1 if found is None else int(found[1])


def _jpeg(content: bytes, _: int) -> tuple[bytes, int]:
    kept, at, exif, xmp, pixels = [content[:2]], 2, 1, 1, 0
    for _part in range(_PARTS):
        match = _MARKER.match(content, at)
        if match is None or match[1][0] in _ALONE:
            raise ValueError("has something else between its segments, or is cut")
        kind, at = match[1][0], match.end()
        if kind == 0xDA:
            scans = content.count(b"\xff\xda", at) + 1
            if scans * max(pixels, _LEAST_PIXELS) > _MOST_SCANNED:
                raise ValueError(f"has {scans} scans, which take too long")
            return b"".join([*kept, b"\xff\xda", content[at:]]), exif if exif != 1 else xmp
        (length,) = struct.unpack_from(">H", content, at)
        segment = content[at : at + length]
        if len(segment) != length:
            raise IndexError
        at, body = at + length, segment[2:]
        if kind in _FRAMES:
            height, width = struct.unpack_from(">HH", body, 1)
            pixels = height * width
        if kind == 0xE1 and body.startswith(_EXIF):
            exif = exif if exif != 1 else exif_orientation(body)
        elif kind == 0xE1 and body.startswith(_XMP_JPEG):
            xmp = xmp_orientation(body)
        is_colour = body.startswith((b"JFIF\0", b"Adobe"))
        if is_colour or not (0xE0 <= kind <= 0xEF or kind == 0xFE):
            kept += [bytes((0xFF, kind)), segment]
    raise ValueError(f"has more than {_PARTS} segments")


def _png(content: bytes, _: int) -> tuple[bytes, int]:
    kept, at, exif, xmp = [content[:8]], 8, 1, 1
    for _part in range(_PARTS):
        if at + 12 > len(content):
            break
        (length,) = struct.unpack_from(">I", content, at)
        kind, end = content[at + 4 : at + 8], at + 12 + length
        if kind == b"eXIf":
            exif = exif_orientation(content[at + 8 : end - 4])
        elif kind == b"iTXt" and content.startswith(_XMP_PNG, at + 8):
            xmp = xmp_orientation(content[at + 8 : end - 4])
        # Critical chunks, which the pixels need, and the one that says which are transparent.
        if not kind[0] & 0x20 or kind == b"tRNS":
            kept.append(content[at:end])
        at = end
        if kind == b"IEND":
            break
    else:
        raise ValueError(f"has more than {_PARTS} chunks")
    return b"".join(kept), exif if exif != 1 else xmp


def _gif(content: bytes, _: int) -> tuple[bytes, int]:
    at = 13 + (6 << (content[10] & 7) if content[10] & 0x80 else 0)
    kept, parts = [content[:at]], 0
    while content[at] != 0x2C:  # the first image; later images are never read
        begin, at = at, at + 2
        if content[begin] != 0x21:
            raise ValueError("has something else than blocks before its first image")
        while content[at]:
            at, parts = at + 1 + content[at], parts + 1
            if parts > _PARTS:
                raise ValueError(f"has more than {_PARTS} blocks before its first image")
        at += 1
        if content[begin + 1] == 0xF9:  # how the image is shown
            kept = [kept[0], content[begin:at]]
    return b"".join([*kept, content[at:]]), 1


def _webp(content: bytes, most_pixels: int) -> tuple[bytes, int]:
    if content[12:16] == b"VP8X":
        sizes = (int.from_bytes(content[at : at + 3], "little") + 1 for at in (24, 27))
        width, height = sizes
        if width * height > most_pixels:
            text = f"has {width} x {height} pixels; at most {most_pixels} are decoded"
            raise ValueError(text)
    return content, 1  # pillow gets WEBP's metadata from a C library, and does not parse it


def _bmp(content: bytes, _: int) -> tuple[bytes, int]:
    (size,) = struct.unpack_from("<I", content, 14)
    if size >= 40 and struct.unpack_from("<I", content, 30)[0] in (1, 2):
        raise ValueError("has run lengths of a BMP, which take too long")
    return content, 1


_READERS: dict[bytes, Callable[[bytes, int], tuple[bytes, int]]] = {
    b"\xff\xd8": _jpeg,
    b"\x89PNG\r\n\x1a\n": _png,
    b"GIF8": _gif,
    b"RIFF": _webp,
    b"BM": _bmp,
}
