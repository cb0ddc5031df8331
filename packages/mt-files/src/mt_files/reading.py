"""Reading of untrusted files."""

from __future__ import annotations

import gc
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

from mt_files.error import FileError, system_error
from mt_files.field import shorten

T = TypeVar("T")

_MAX_DIGITS = 40  # 2**128 has 39
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(path: str | Path, *, within: str | Path | None = None) -> BinaryIO:
    """Open a regular file for reading, without ever waiting (as for the writer of a FIFO).

    Args:
        path: The file; symbolic links are followed.
        within: Folder that links must not leave. Pass it for names found in a folder or in a file;
            omit it for a path typed by the user.

    Raises:
        MissingFileError: There is no such file.
        FileError: It is not a regular file, lies outside `within`, or the system refuses it.
    """
    real = path if _is_plain(path, within) else _checked(path, within)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW
    try:
        descriptor = os.open(real, flags)
    except OSError as error:
        raise system_error(path, "open it", error) from error
    file = os.fdopen(descriptor, "rb")
    try:  # again: it may have been exchanged in between
        _check_kind(path, os.fstat(descriptor))
    except FileError:
        file.close()
        raise
    return file


def read_bytes(path: str | Path, *, limit: int, within: str | Path | None = None) -> bytes:
    """Read a whole regular file of at most `limit` bytes; see `open_file` for `within`.

    Raises:
        FileError: `open_file` refuses it, it is larger than `limit`, or reading fails.
    """
    with open_file(path, within=within) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise FileError(path, f"has {size} bytes; at most {limit} are read of such a file")
        try:
            # Not limit + 1 at once: that much memory would be asked for.
            content = file.read(size + 1)
            if len(content) > size:  # it grew, or is one of /proc
                content += file.read(limit + 1 - len(content))
        except OSError as error:
            raise system_error(path, "read it", error) from error
    if len(content) > limit:
        raise FileError(path, f"grew beyond {limit} bytes, the limit for such a file")
    return content


def read_text(path: str | Path, *, limit: int, within: str | Path | None = None) -> str:
    """Read a whole UTF-8 file of at most `limit` bytes.

    Raises:
        FileError: `read_bytes` refuses it, or it is not UTF-8.
    """
    return _decode(path, read_bytes(path, limit=limit, within=within))


def read_json(
    path: str | Path,
    *,
    limit: int,
    within: str | Path | None = None,
    constant: Callable[[str], Any] | None = None,
) -> Any:
    """Read one JSON value from a file of at most `limit` bytes; see `parse_json`.

    Raises:
        FileError: `read_bytes` refuses it, or it holds no JSON that `parse_json` takes.
    """
    content = read_bytes(path, limit=limit, within=within)
    return parse_json(content, name=path, constant=constant)


def parse_json(
    content: bytes | str, *, name: str | Path, constant: Callable[[str], Any] | None = None
) -> Any:
    """Parse one JSON value according to RFC 8259.

    NaN, Infinity, numbers beyond fp64, integers of more than 40 digits, a key that an object has
    twice, and nesting deeper than the interpreter's recursion limit are refused.

    Args:
        content: The text, or its UTF-8 bytes.
        name: Name of the content in error messages.
        constant: Function that returns the value of NaN, Infinity or -Infinity, for files of
            programs that write them; it raises ValueError to refuse one.

    Raises:
        FileError: The content is refused.
    """
    text = _decode(name, content) if isinstance(content, bytes) else content
    try:
        return without_collection(
            json.loads,
            text,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=constant or _no_constant,
            object_pairs_hook=_unique,
        )
    except RecursionError:
        raise FileError(name, "is nested too deeply to be read as JSON") from None
    except ValueError as error:
        raise FileError(name, f"is not valid JSON: {error}") from error


def without_collection(action: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Return what an action returns that may recurse to the interpreter's limit, such as decoding.

    The garbage collector waits meanwhile. At the limit it would call finalizers without room for
    their calls, and Python would print each as an ignored RecursionError.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        return action(*arguments, **options)
    finally:
        if is_enabled:
            gc.enable()


def _is_plain(path: str | Path, within: str | Path | None) -> bool:
    """Return whether a name leads to a regular file below `within` by folders alone, no links.

    It then lies in there wherever `within` itself is; `_checked` needs 20 times as long to say so.
    """
    place, name = os.fspath(within or ""), os.fspath(path)
    if not place or not name.startswith(f"{place}/"):
        return False
    *folders, last = name[len(place) + 1 :].split("/")
    if not {"", ".", ".."}.isdisjoint((*folders, last)):
        return False
    try:
        for part in folders:
            place = f"{place}/{part}"
            if not stat.S_ISDIR(os.lstat(place).st_mode):
                return False
        return stat.S_ISREG(os.lstat(name).st_mode)
    except (OSError, ValueError):  # `_checked` says which
        return False


def _checked(path: str | Path, within: str | Path | None) -> str:
    """Return the real path of a regular file, without opening it."""
    try:
        real = os.path.realpath(path, strict=True)
        status = os.stat(real, follow_symlinks=False)
        root = None if within is None else os.path.realpath(within, strict=True)
    except OSError as error:
        raise system_error(path, "read it", error) from error
    except ValueError as error:  # a NUL in the name
        raise FileError(path, f"is no file name: {error}") from error
    if root is not None and os.path.commonpath([root, real]) != root:
        raise FileError(
            path, f"leads out of {within} to {real}; put the file itself there, not a link"
        )
    _check_kind(path, status)
    return real


def _check_kind(path: str | Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise FileError(path, f"is {kind}, and a regular file is needed")


def _decode(path: str | Path, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise FileError(path, f"is not UTF-8: {error.reason} at byte {error.start}") from error


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits; at most {_MAX_DIGITS} are read")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:_MAX_DIGITS]} is too large")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs; readers disagree about which of two equal keys counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {shorten(twice)} is there twice; remove one of the two")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")
