"""Where in a text the pieces of sentencepiece stand, from its serialised `SentencePieceText`.

https://github.com/google/sentencepiece/blob/master/src/sentencepiece.proto. The library's own
reader of it needs protobuf.
"""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_PIECES, _ID, _BEGIN, _END = 2, 2, 4, 5


def piece_places(content: bytes, text: str) -> tuple[list[int], list[int], list[int]]:
    """Return the id of each piece, and the characters [begin, end) of the text that it stands for.

    Args:
        content: The serialised message.
        text: The text.
    """
    character: dict[int, int] = {}
    size = 0
    for number, char in enumerate(text):
        character[size] = number
        size += len(char.encode())
    character[size] = len(text)
    parts = [part for field, part in _fields(content) if field == _PIECES]
    pieces = [dict(_fields(part)) for part in parts if isinstance(part, bytes)]
    return (
        [int(piece.get(_ID, 0)) for piece in pieces],
        [character[int(piece.get(_BEGIN, 0))] for piece in pieces],
        [character[int(piece.get(_END, 0))] for piece in pieces],
    )


def _fields(content: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield the number and the value of each field of a message."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(content, at)
            yield key >> 3, value
            continue
        size = 8 if kind == _FIXED64 else 4
        if kind == _BYTES:
            size, at = _varint(content, at)
        yield key >> 3, content[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while content[at] & 0x80:
        value |= (content[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
    return value | content[at] << shift, at + 1
