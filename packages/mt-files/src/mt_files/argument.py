"""Checks of arguments."""

from __future__ import annotations

import os
import re
import reprlib

# `Path` makes one slash of two, so a URL that was a `Path` is one too.
_URL = re.compile(r"(s3|gs|az):/{1,2}(?=[^/])")


def check_type(name: str, value: object, *kinds: type) -> None:
    """Raise TypeError unless `value` is an instance of one of the kinds; a bool is no number."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = [kind.__name__ for kind in kinds if kind is not type(None)]
        listed = " or ".join(f"{'an' if n[0].lower() in 'aeiou' else 'a'} {n}" for n in names)
        listed += " or None" if type(None) in kinds else ""
        raise TypeError(
            f"{name} must be {listed}, got {reprlib.repr(value)} ({type(value).__name__})"
        )


def multiples_near(value: int, unit: int) -> str:
    """Return the nearest multiples of `unit` around a size, for an error message."""
    below = value // unit * unit
    return " or ".join(str(size) for size in (below, below + unit) if size > 0)


def object_url(path: str | os.PathLike[str]) -> str | None:
    """Return the URL of an object or a prefix in an object store; None for a local path."""
    text = str(path)
    match = _URL.match(text)
    return None if match is None else f"{match[1]}://{text[match.end() :]}"


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return the path as another process finds it: from the root, or the URL of a store."""
    return object_url(path) or os.path.abspath(local_path(path))


def local_path(path: str | os.PathLike[str]) -> str:
    """Return the path that a `file://` URL names; any other text as it is."""
    from urllib.parse import unquote, urlsplit

    text = os.fspath(path)
    return unquote(urlsplit(text).path) if text.startswith("file:///") else text
