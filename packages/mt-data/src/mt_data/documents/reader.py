"""Reading of documents: JSON lines, JSON arrays, parquet, plain text, folders, compressed files."""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from mt_files import listed, require, shorten

from mt_data.documents.parts import Part, cut, digest_of
from mt_data.documents.source import COMPRESSED, Source, SourceFile, decompressed, find_files
from mt_data.error import DataError, DataFileError

MAX_LINE = 1 << 28
MAX_TEXT = 1 << 31
_ENDINGS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}
_CHUNK = 1 << 20
_ROWS = 1024
_REASON = 300
_TAIL = 16
OnError = Callable[[DataFileError], None]
Format = Literal["auto", "jsonl", "json", "text", "parquet"]


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
    format: Format = "auto",
    encoding_errors: Literal["strict", "replace"] = "strict",
    on_error: OnError | None = None,
    part: Part | None = None,
) -> DocumentReader:
    """Read documents from files, folders, globs or standard input, in a fixed order.

    `.jsonl` and `.ndjson` files have one JSON object on each line, `.json` files an array of
    objects or objects one after the other, `.parquet` files a column of texts; any other file is
    one document. Files that end with `.gz`, `.zst`, `.bz2` or `.xz` are decompressed. A UTF-8 byte
    order mark is dropped; line ends are kept. Only regular files are read, and no link that leads
    out of a folder.

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
        part: The share of the source to read; the documents of all parts in their order are those
            of the source. Files of JSON lines are cut between lines; a compressed file, and one of
            another format, belongs to one part as a whole.

    Raises:
        DataError: The glob is not a pattern for files of a folder, or no file matches it; standard
            input is to be read in parts.
        DataFileError: A line or file cannot be read; names the file, the line and the reason.
        FileNotFoundError: There is no such file or folder.
    """
    if encoding_errors not in ("strict", "replace"):
        raise DataError(f"encoding_errors is {encoding_errors!r}; choose 'strict' or 'replace'")
    if format not in get_args(Format):
        raise DataError(f"format is {shorten(format)}; choose one of {', '.join(get_args(Format))}")
    policy = _Policy(key=key, encoding_errors=encoding_errors, on_error=on_error)
    # The files are found here and not in the iterator, so that a wrong path fails at the call.
    files = find_files(source, glob)
    if part is None:
        return DocumentReader(files, format, policy)
    if any(file.is_standard_input for file in files):
        raise DataError("standard input can't be read in parts; give files")
    mine = cut(files, part, partial(_is_cut_by_lines, format=format))
    sources = digest_of(files, key, format, encoding_errors)
    return DocumentReader(mine, format, policy, {**asdict(part), "sources": sources})


class DocumentReader(Iterator[Document]):
    """An iterator over the documents of files.

    Attributes:
        files: The files to read.
        total_bytes: Size of all files on disk; None if standard input is one of them.
        part: Which part of a source this is: its number, the count of parts, and a digest of all
            files of the source, by which the parts are known to fit together. None if it is all.
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
        kind = _format_of(source, self._format)
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
            values, text_of = _RECORDS[kind]
            if source.end is not None:
                values = partial(_lines, begin=source.begin, end=source.end)
            for number, value in values(content, name, policy):
                where = f"{name}:{number}"
                try:
                    text = text_of(value, where, policy)
                except DataFileError as error:
                    policy.refuse(error)
                else:
                    yield Document(path=name, text=text, line=number)


def _read_text(file: BinaryIO, name: str, policy: _Policy) -> Document:
    content = file.read(MAX_TEXT + 1)
    if len(content) > MAX_TEXT:
        raise DataFileError(
            name, f"is one document of more than {MAX_TEXT} bytes; split it, or use JSON lines"
        )
    return Document(path=name, text=_decode(content, name, policy))


def _format_of(source: SourceFile, format: Format) -> str:
    if format != "auto":
        return format
    return "jsonl" if source.is_standard_input else _ENDINGS.get(source.ending, "text")


def _is_cut_by_lines(source: SourceFile, *, format: Format) -> bool:
    whole = source.name.lower().endswith(COMPRESSED)
    return not whole and _format_of(source, format) == "jsonl"


def _lines(
    file: BinaryIO, name: str, _: _Policy, *, begin: int = 0, end: int | None = None
) -> Iterator[tuple[int, bytes]]:
    return numbered_lines(file, name, begin=begin, end=end)


def numbered_lines(
    file: BinaryIO, name: str, *, begin: int = 0, end: int | None = None
) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank and begin in bytes [begin, end), with their numbers.

    Raises:
        DataFileError: A line is longer than `MAX_LINE`.
    """
    number = _skip_lines(file, begin)
    while (end is None or file.tell() < end) and (line := file.readline(MAX_LINE + 1)):
        number += 1
        if len(line) > MAX_LINE:
            raise DataFileError(f"{name}:{number}", f"the line is longer than {MAX_LINE} bytes")
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        line = line.rstrip(b"\r\n")
        if line.strip():
            yield number, line


def _skip_lines(file: BinaryIO, begin: int) -> int:
    """Go to the first line that begins at byte `begin` or behind it; return how many are before."""
    count = 0
    left = begin - 1
    while left > 0 and (content := file.read(min(left, _CHUNK))):
        count += content.count(b"\n")
        left -= len(content)
    if begin:  # the line of byte begin - 1, which may be its end alone
        while (content := file.readline(_CHUNK)) and not content.endswith(b"\n"):
            pass
        count += 1
    return count


def _line_text(line: bytes, where: str, policy: _Policy) -> str:
    return _record_text(_parse(_decode(line, where, policy), where), where, policy)


def _parse(content: str, where: str) -> object:
    try:
        return _DECODER.decode(content)
    except json.JSONDecodeError as error:
        problem = f"not valid JSON: {error.msg} at character {error.pos + 1}"
        raise DataFileError(where, problem) from None
    except (ValueError, RecursionError) as error:
        raise DataFileError(where, f"not valid JSON: {error}") from None


class _Values:
    """The JSON values of a file, read incrementally: an array, or values one after the other."""

    def __init__(self, file: BinaryIO, name: str, policy: _Policy) -> None:
        self._file, self._name, self._policy = file, name, policy
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")(policy.encoding_errors)
        self._buffer = ""
        self._at = 0
        self._ended = False

    def __iter__(self) -> Iterator[tuple[int, object]]:
        in_array = self._sign() == "["
        self._at += in_array
        for number in itertools.count(1):
            sign = self._sign()
            if in_array and sign == "]":
                self._at += 1
                in_array, sign = False, self._sign()
                if sign:
                    raise self._problem("something follows the array")
                return
            if not sign:
                if in_array:
                    raise self._problem("the array does not end")
                return
            if in_array and number > 1:
                if sign != ",":
                    raise self._problem("expecting ',' between the array's elements")
                self._at += 1
                self._sign()
            yield number, self._value()

    def _sign(self) -> str:
        """Return the next character that is not white space; "" at the end."""
        while True:
            while self._at < len(self._buffer) and self._buffer[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._buffer) or not self._more():
                return self._buffer[self._at : self._at + 1]

    def _value(self) -> object:
        while True:
            try:
                value, self._at = _DECODER.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                near = error.pos >= len(self._buffer) - _TAIL
                if (near or error.msg.startswith("Unterminated")) and self._more():
                    continue
                raise self._problem(error.msg) from None
            except (ValueError, RecursionError) as error:
                raise self._problem(str(error)) from None
            else:
                return value

    def _more(self) -> bool:
        """Read more: as much as is waiting, so that a long value is parsed at most twice."""
        if self._ended:
            return False
        rest = self._buffer[self._at :]
        if len(rest) > MAX_LINE:
            raise self._problem(f"a value is longer than {MAX_LINE} characters")
        content = self._file.read(max(_CHUNK, len(rest)))
        self._ended = not content
        try:
            rest += self._decoder.decode(content, self._ended)
        except UnicodeDecodeError as error:
            problem = f"invalid UTF-8 (0x{error.object[error.start]:02x}): {error.reason}"
            raise DataFileError(self._name, problem) from None
        self._buffer, self._at = rest, 0
        return True

    def _problem(self, text: str) -> DataFileError:
        near = self._buffer[self._at : self._at + 40]
        return DataFileError(self._name, f"not valid JSON: {text}, near {shorten(near)}")


def _rows(file: BinaryIO, name: str, policy: _Policy) -> Iterator[tuple[int, object]]:
    library = require("pyarrow.parquet", f"reading {name}")
    number = 0
    try:
        table = library.ParquetFile(file)
        _check_column(table.schema_arrow.names, name, policy)
        for batch in table.iter_batches(batch_size=_ROWS, columns=[policy.key]):
            for value in batch.column(0).to_pylist():
                number += 1
                yield number, value
    except (DataError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - the library raises several kinds
        problem = f"cannot be read as parquet: {str(error)[:_REASON]}"
        raise DataFileError(name, problem) from None


def _check_column(names: list[str], name: str, policy: _Policy) -> None:
    if policy.key not in names:
        raise DataFileError(name, f"no column {shorten(policy.key)}; it has {listed(names)}")


def _record_text(record: object, where: str, policy: _Policy) -> str:
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


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {shorten(twice)} occurs twice")
    return record


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)


# For each format of several documents: the records of a file, and the text of a record.
_RECORDS: dict[str, tuple[Callable[..., Iterable[tuple[int, Any]]], Callable[..., str]]] = {
    "jsonl": (_lines, _line_text),
    "json": (_Values, _record_text),
    "parquet": (_rows, _checked_text),
}


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
