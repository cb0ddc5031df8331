"""Reading documents: JSON lines, plain text files, folders of sources."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

from mt_data.error import DataError, DataFileError

JSON_LINES = (".jsonl", ".ndjson")
MAX_LINE = 1 << 28
Source = str | os.PathLike[str]
OnError = Callable[[DataFileError], None]


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document.

    Attributes:
        path: the file it came from; relative to the folder when a folder was read.
        text: its content.
        line: line number in a JSON lines file, from 1; None for a plain file.
    """

    path: str
    text: str
    line: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Policy:
    key: str
    encoding_errors: Literal["strict", "replace"]
    on_error: OnError | None

    def refuse(self, error: DataFileError) -> None:
        if self.on_error is None:
            raise error
        self.on_error(error)


def read_documents(
    source: Source | Iterable[Source],
    *,
    key: str = "text",
    glob: str = "**/*",
    encoding_errors: Literal["strict", "replace"] = "strict",
    on_error: OnError | None = None,
) -> Iterator[Document]:
    """Documents of a file, of several files, or of a folder, in a fixed order.

    A `.jsonl` or `.ndjson` file holds one JSON object a line; any other file is one document.
    A UTF-8 byte order mark is dropped, line ends are kept as they are.

    Args:
        source: a file, a folder (its files in order of their relative names), or an iterable of
            files (in the given order).
        key: field of a JSON object that holds the text.
        glob: which files of a folder to read, such as `**/*.py`.
        encoding_errors: "replace" puts U+FFFD where bytes are not UTF-8.
        on_error: called with each bad line or file, which is then skipped; None raises instead.

    Raises:
        DataError: the glob is no pattern for files of a folder, or none matches it.
        DataFileError: a line or file cannot be read; names the file, the line and the reason.
        FileNotFoundError: there is no such file or folder.
    """
    if encoding_errors not in ("strict", "replace"):
        raise DataError(f"encoding_errors is {encoding_errors!r}; choose 'strict' or 'replace'")
    policy = _Policy(key=key, encoding_errors=encoding_errors, on_error=on_error)
    # Checked here and not in the generator, so that a wrong path is an error at the call.
    return _read(_files(source, glob), policy)


def _files(source: Source | Iterable[Source], glob: str) -> Iterable[tuple[Path, str]]:
    if not isinstance(source, str | os.PathLike):
        return ((Path(path), os.fspath(path)) for path in source)
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if not path.is_dir():
        return [(path, os.fspath(path))]
    _check_glob(glob)
    files = sorted(
        (file.relative_to(path).as_posix(), file) for file in path.glob(glob) if file.is_file()
    )
    if not files:
        raise DataError(f"{path}: no file in this folder matches the glob {glob!r}")
    return [(file, name) for name, file in files]


def _check_glob(glob: str) -> None:
    """Refuse what pathlib refuses, each Python version in its own way."""
    parts = PurePath(glob).parts
    stars = any("**" in part and part != "**" for part in parts)
    if stars or not parts or PurePath(glob).is_absolute():
        raise DataError(
            f"glob {glob!r} does not choose files below a folder; give a relative pattern in which "
            "** stands alone between slashes, such as '**/*.py'"
        )


def _read(files: Iterable[tuple[Path, str]], policy: _Policy) -> Iterator[Document]:
    for path, name in files:
        if path.suffix.lower() in JSON_LINES:
            yield from _read_lines(path, name, policy)
            continue
        try:
            text = _decode(path.read_bytes(), name, policy)
        except DataFileError as error:
            policy.refuse(error)
        else:
            yield Document(path=name, text=text)


def _read_lines(path: Path, name: str, policy: _Policy) -> Iterator[Document]:
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            where = f"{name}:{number}"
            if len(line) > MAX_LINE:
                raise DataFileError(where, f"the line is longer than {MAX_LINE} bytes")
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            line = line.rstrip(b"\r\n")
            if not line.strip():
                continue
            try:
                text = _line_text(line, where, policy)
            except DataFileError as error:
                policy.refuse(error)
            else:
                yield Document(path=name, text=text, line=number)


def _line_text(line: bytes, where: str, policy: _Policy) -> str:
    content = _decode(line, where, policy)
    try:
        record = json.loads(
            content, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant
        )
    except json.JSONDecodeError as error:
        problem = f"not valid JSON: {error.msg} at character {error.pos + 1}"
        raise DataFileError(where, problem) from None
    except (ValueError, RecursionError) as error:
        raise DataFileError(where, f"not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise DataFileError(where, f"expected a JSON object, found {type(record).__name__}")
    if policy.key not in record:
        keys = ", ".join(repr(key) for key in sorted(record)) or "none"
        raise DataFileError(where, f"no key {policy.key!r}; the object has {keys}")
    text = record[policy.key]
    if not isinstance(text, str):
        raise DataFileError(where, f"{policy.key!r} must be a string, found {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if policy.encoding_errors == "strict":
            raise DataFileError(
                where, f"{policy.key!r} has a lone surrogate at character {error.start}"
            ) from None
        text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return text


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return record


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _decode(content: bytes, where: str, policy: _Policy) -> str:
    try:
        return content.removeprefix(codecs.BOM_UTF8).decode("utf-8", policy.encoding_errors)
    except UnicodeDecodeError as error:
        raise DataFileError(
            where,
            f"invalid UTF-8 at byte {error.start} (0x{content[error.start]:02x}): {error.reason}",
        ) from None


NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})


def standard_library_sources() -> list[Path]:
    """The `.py` files of the running Python's standard library, about 11 MB.

    Without installed packages, the library's own tests, files that are not UTF-8, empty files
    and copies of a file already listed. Sorted by name, so the order is the same everywhere.
    """
    import sysconfig

    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    seen: set[bytes] = set()
    for path in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix()):
        folders = path.relative_to(root).parts[:-1]
        if NOT_LIBRARY.intersection(folders) or TEST_FOLDERS.intersection(folders):
            continue
        content = path.read_bytes()
        if not content.strip() or content in seen or not _is_utf8(content):
            continue
        seen.add(content)
        found.append(path)
    return found


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
