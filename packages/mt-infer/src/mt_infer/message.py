"""Values as bytes, without pickle: JSON, then the bytes objects in it, unchanged."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

_TAG = 16  # letters of the random key that marks values outside JSON
_SIZE = 8  # bytes of a length
HEAD = _TAG + 2 * _SIZE
"""Number of bytes of the head of a message, from which `size_behind` knows the rest."""


def pack(value: Any, adapted: Callable[[Any], Any] | None = None) -> bytes:
    """Return a value of JSON as bytes; it may hold bytes, and dataclasses of `unpack`.

    Args:
        value: The value. Keys of mappings become texts.
        adapted: Function that makes a dataclass of anything else.

    Raises:
        TypeError: The value holds something else.
    """
    raw, tag = list[bytes](), secrets.token_hex(_TAG // 2)

    def tagged(x: Any) -> Any:
        if isinstance(x, bytes):
            raw.append(x)
            return {tag: "bytes", "size": len(x)}
        if is_dataclass(x):
            named = ((name, usual, getattr(x, name)) for name, usual in _defaults(type(x)))
            held = {name: value for name, usual, value in named if value is not usual}
            return {tag: type(x).__name__, **held}
        if adapted is None:
            raise TypeError(f"{type(x).__name__} can't be sent; give numbers and texts")
        return adapted(x)

    text = json.dumps(value, default=tagged, separators=(",", ":")).encode()
    sizes = len(text).to_bytes(_SIZE), sum(map(len, raw)).to_bytes(_SIZE)
    return b"".join([tag.encode(), *sizes, text, *raw])


@cache
def _defaults(kind: type[Any]) -> list[tuple[str, Any]]:
    """Return the names of a dataclass's fields with their defaults."""
    return [(each.name, each.default) for each in fields(kind)]


def size_behind(head: bytes) -> int:
    """Return the number of bytes after the head of a message."""
    return sum(int.from_bytes(head[start : start + _SIZE]) for start in (_TAG, _TAG + _SIZE))


def unpack(message: bytes, *kinds: type[Any], **makers: Callable[..., Any]) -> Any:
    """Return the value of `pack`.

    Args:
        message: The bytes.
        kinds: Dataclasses that the value may hold; their sequences become tuples.
        makers: Functions that make further dataclasses from their fields, by name.

    Raises:
        ValueError: The bytes are not from `pack`, or hold another dataclass.
    """
    known = {kind.__name__: kind for kind in kinds}
    tag = message[:_TAG].decode()
    place = HEAD + int.from_bytes(message[_TAG : _TAG + _SIZE])
    text = message[HEAD:place]

    def made(found: dict[str, Any]) -> Any:
        nonlocal place
        name = found.pop(tag, None)
        if name is None:
            return found
        if name == "bytes":
            place += found["size"]
            return message[place - found["size"] : place]
        if name in makers:
            return makers[name](**found)
        if name not in known:
            raise ValueError(f"{name} is not expected here")
        return known[name](**{k: tuple(x) if isinstance(x, list) else x for k, x in found.items()})

    return json.loads(text, object_hook=made)
