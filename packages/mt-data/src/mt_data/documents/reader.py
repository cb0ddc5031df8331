"""Reading of documents: texts, and records of several formats, in files and folders."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from mt_files import listed, shorten, without_collection

from mt_data.documents.parts import Part, cut, digest_of
from mt_data.documents.records import (
    DECODER,
    EncodingErrors,
    Format,
    format_of,
    read_records,
)
from mt_data.documents.source import COMPRESSED, Source, SourceFile, decompressed, find_files
from mt_data.error import DataError, DataFileError, one_of

MAX_TEXT = 1 << 31
OnError = Callable[[DataFileError], None]


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document.

    Attributes:
        path: The source file; relative to the folder if a folder was read.
        text: The content.
        line: Number of the line, record or row in a file of several documents, from 1; None if the
            file is one document.
    """

    path: str
    text: str
    line: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Policy:
    key: str
    encoding_errors: EncodingErrors
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
    format: Format = "auto",
    encoding_errors: EncodingErrors = "strict",
    on_error: OnError | None = None,
    part: Part | None = None,
) -> DocumentReader:
    """Read documents from files, folders, globs or standard input, in a fixed order.

    `.jsonl` and `.ndjson` files have one JSON object on each line, `.json` files an array of
    objects or objects one after the other, `.parquet` and `.arrow` files a column of texts; any
    other file is one document. Files that end with `.gz`, `.zst`, `.bz2` or `.xz` are decompressed.
    A folder that Hugging Face's `datasets` saved gives its rows. A UTF-8 byte order mark is
    dropped; line ends are kept. Only regular files are read, and no link that leads out of a
    folder.

    Args:
        source: A file, a folder (its files in order of their relative names), a glob, `-` for
            standard input (JSON lines by default), a URL of an object store such as
            `s3://bucket/folder` for each of these, or several.
        key: Name of the JSON field or column with the text.
        glob: Pattern of the files to read in a folder, such as `**/*.py`.
        format: Format of all files; "auto" decides by their names.
        encoding_errors: "replace" inserts U+FFFD for bytes that are not UTF-8.
        on_error: Function to call with each bad line or file, which is then skipped; None raises
            instead.
        part: The share of the source to read; all parts in their order have the documents of the
            source. Files of JSON lines are cut between lines; a compressed file, or one of another
            format, belongs to one part as a whole.

    Raises:
        DataError: The glob is not a pattern for files of a folder, or no file matches it; standard
            input is to be read in parts.
        DataFileError: A line or file cannot be read; names the file, the line and the reason.
        FileNotFoundError: There is no such file or folder.
    """
    one_of(EncodingErrors, encoding_errors=encoding_errors)
    one_of(Format, format=format)
    policy = _Policy(key=key, encoding_errors=encoding_errors, on_error=on_error)
    # The files are found here and not in the iterator, so that a wrong path fails at the call.
    files = find_files(source, glob)
    if part is None:
        return DocumentReader(files, format, policy)
    if any(file.is_standard_input for file in files):
        raise DataError("standard input can't be read in parts; give files")
    mine = cut(files, part, partial(_is_cut_by_lines, format=format))
    sources = digest_of(files, key, format, encoding_errors)
    return DocumentReader(mine, format, policy, {**part.record, "sources": sources})


class DocumentReader(Iterator[Document]):
    """An iterator over the documents of files.

    Attributes:
        files: The files to read.
        total_bytes: Size of all files on disk; None if standard input is one of them.
        part: Number of this part of the source, the count of parts, and a digest of all files of
            the source, which shows that parts fit together. None for a whole source.
    """

    def __init__(
        self,
        files: list[SourceFile],
        format: Format,
        policy: _Policy,
        part: dict[str, int | str] | None = None,
    ) -> None:
        self.files, self.part = files, part
        known = not any(file.is_standard_input for file in files)
        self.total_bytes = sum(file.size for file in files) if known else None
        self._format: Format = format
        self._policy = policy
        self._finished = 0
        self._current: BinaryIO | None = None
        self._begin = 0
        self._documents = self._read()

    def __iter__(self) -> DocumentReader:
        return self

    def __next__(self) -> Document:
        return next(self._documents)

    @property
    def read_bytes(self) -> int:
        """Number of bytes read from the files on disk so far."""
        position = 0
        if self._current is not None and not self._current.closed and self._current.seekable():
            position = max(0, self._current.tell() - self._begin)
        return self._finished + position

    def _read(self) -> Iterator[Document]:
        for source in self.files:
            size = source.size
            try:
                yield from self._read_file(source)
            except DataFileError as error:
                self._policy.refuse(error)
            self._current = None
            self._finished += size

    def _read_file(self, source: SourceFile) -> Iterator[Document]:
        kind = format_of(source, self._format)
        name, policy = source.name, self._policy
        with ExitStack() as stack:
            file = source.open()
            if not source.is_standard_input:
                stack.enter_context(file)
            self._current, self._begin = file, source.begin
            content = stack.enter_context(decompressed(file, name))
            if kind == "text":
                yield _read_text(content, name, policy)
                return
            records = read_records(
                content,
                source,
                kind,
                columns=[policy.key],
                encoding_errors=policy.encoding_errors,
            )
            for number, record in records:
                where = source.place(number)
                try:
                    text = _text_of(record, where, policy)
                except DataFileError as error:
                    policy.refuse(error)
                else:
                    line = number if source.is_numbered else None
                    yield Document(path=name, text=text, line=line)


def _read_text(file: BinaryIO, name: str, policy: _Policy) -> Document:
    content = file.read(MAX_TEXT + 1)
    if len(content) > MAX_TEXT:
        raise DataFileError(
            name, f"is one document of more than {MAX_TEXT} bytes; split it, or use JSON lines"
        )
    return Document(path=name, text=_decode(content, name, policy))


def _is_cut_by_lines(source: SourceFile, *, format: Format) -> bool:
    whole = source.name.lower().endswith(COMPRESSED)
    return not whole and format_of(source, format) == "jsonl"


def _parse(content: str, where: str) -> object:
    try:
        return without_collection(DECODER.decode, content)
    except json.JSONDecodeError as error:
        problem = f"not valid JSON: {error.msg} at character {error.pos + 1}"
        raise DataFileError(where, problem) from None
    except (ValueError, RecursionError) as error:
        raise DataFileError(where, f"not valid JSON: {error}") from None


def _text_of(record: object, where: str, policy: _Policy) -> str:
    """Return the text of a record: the bytes of a line, a JSON value, or a row."""
    if isinstance(record, bytes):
        record = _parse(_decode(record, where, policy), where)
    if not isinstance(record, dict):
        raise DataFileError(where, f"expected a JSON object, found {type(record).__name__}")
    if policy.key not in record:
        keys = listed(sorted(record))
        raise DataFileError(where, f"no key {shorten(policy.key)}; the object has {keys}")
    return _checked_text(record[policy.key], where, policy)


def _checked_text(text: object, where: str, policy: _Policy) -> str:
    if isinstance(text, bytes):
        return _decode(text, where, policy)
    if not isinstance(text, str):
        kind = type(text).__name__
        raise DataFileError(where, f"{shorten(policy.key)} must be a string, found {kind}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if policy.encoding_errors == "strict":
            raise DataFileError(
                where, f"{shorten(policy.key)} has a lone surrogate at character {error.start}"
            ) from None
        text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return text


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
    """Return the `.py` files of the running Python's standard library, about 11 MB.

    Installed packages, the library's own tests, files that are not UTF-8, empty files and copies
    are left out. The list is sorted by name, so the order is the same everywhere.
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
