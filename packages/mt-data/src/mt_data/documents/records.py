"""Records of files: lines of JSON lines, JSON values, rows of parquet and of Arrow."""

from __future__ import annotations

import codecs
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, BinaryIO, Literal, TypeAlias, cast

from mt_files import FileError, listed, require, shorten, without_collection

from mt_data.documents.source import SourceFile
from mt_data.error import DataError, DataFileError

MAX_LINE = 1 << 28
Format = Literal["auto", "jsonl", "json", "text", "parquet", "arrow"]
EncodingErrors: TypeAlias = Literal["strict", "replace"]
_ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_CHUNK = 1 << 20
_ROWS, _FEW_ROWS = 1024, 16
_BATCH_BYTES = 1 << 26
_REASON = 300
_TAIL = 16
_ARROW_FILE = b"ARROW1\0\0"


def format_of(source: SourceFile, format: Format = "auto") -> str:
    """Return the format of a file, by its name if it is "auto"; "text" is one document."""
    if format != "auto":
        return format
    return "jsonl" if source.is_standard_input else _ENDINGS.get(source.ending, "text")


def read_records(
    file: BinaryIO,
    source: SourceFile,
    format: str,
    *,
    columns: Sequence[str],
    encoding_errors: EncodingErrors = "strict",
) -> Iterable[tuple[int, Any]]:
    """Return the records of a file with their numbers, from 1; they are read one by one.

    A record is the bytes of a line of JSON lines, a value of a JSON file, or a row of a parquet or
    Arrow file as a dict, with the columns among `columns` that the file has.

    Args:
        file: The content, decompressed.
        source: The file.
        format: Format of several documents.
        columns: Columns to read of parquet and Arrow files.
        encoding_errors: Treatment of bytes of a JSON file that are not UTF-8.

    Raises:
        DataFileError: The content is not of the format, or has none of the columns.
    """
    name = source.name
    if format == "jsonl":
        return _numbered_lines(file, source)
    if format == "json":
        return _Values(file, name, encoding_errors)
    return _rows(file, name, columns, format)


def _numbered_lines(file: BinaryIO, source: SourceFile) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank and begin in the part, with their numbers.

    Raises:
        DataFileError: A line is longer than `MAX_LINE`.
    """
    begin, end = source.begin, source.end
    number = _skip_lines(file, begin, counts=source.is_numbered)
    is_first = begin == 0
    while (end is None or file.tell() < end) and (line := file.readline(MAX_LINE + 1)):
        number += 1
        if len(line) > MAX_LINE:
            text = f"the line is longer than {MAX_LINE} bytes"
            raise DataFileError(source.place(number), text)
        if is_first:
            line = line.removeprefix(codecs.BOM_UTF8)
        is_first = False
        line = line.rstrip(b"\r\n")
        if line.strip():
            yield number, line


def _skip_lines(file: BinaryIO, begin: int, *, counts: bool) -> int:
    """Go to the first line that begins at byte `begin` or after it.

    Returns:
        Number of lines before it; 0 if they are not counted.
    """
    count = 0
    left = begin - 1
    if left > 0 and not counts:
        file.seek(left)
        left = 0
    while left > 0 and (content := file.read(min(left, _CHUNK))):
        count += content.count(b"\n")
        left -= len(content)
    if begin:  # the rest of the line with byte begin - 1, perhaps only its line end
        while (content := file.readline(_CHUNK)) and not content.endswith(b"\n"):
            pass
        count += 1
    return count if counts else 0


class _Values:
    """The JSON values of a file, read incrementally: an array, or values one after the other."""

    def __init__(self, file: BinaryIO, name: str, encoding_errors: EncodingErrors) -> None:
        self._file, self._name = file, name
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")(encoding_errors)
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
                value, self._at = without_collection(DECODER.raw_decode, self._buffer, self._at)
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


def _rows(
    file: BinaryIO, name: str, columns: Sequence[str], format: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a table with their numbers, without a list of all."""
    module, batches = _TABLES[format]
    library = require(module, f"reading {name}")
    number = 0
    try:
        for batch in batches(library, file, partial(_among, columns, name)):
            for start in range(0, batch.num_rows, _ROWS):
                for row in batch.slice(start, _ROWS).to_pylist():
                    number += 1
                    yield number, row
    except (DataError, FileError):
        raise
    except Exception as error:  # noqa: BLE001 - the library raises several kinds
        reason = str(error)[:_REASON] or type(error).__name__
        problem = f"cannot be read as {format}: {reason}"
        raise DataFileError(name, problem) from None


def _among(wanted: Sequence[str], name: str, names: list[str]) -> list[str]:
    """Return the wanted columns that a file has; raise an error if it has none."""
    if found := [each for each in wanted if each in names]:
        return found
    columns = " or ".join(map(shorten, wanted))
    raise DataFileError(name, f"no column {columns}; it has {listed(names)}")


def _parquet(library: ModuleType, file: BinaryIO, chosen: _Chosen) -> Iterator[Any]:
    """Yield batches of rows: few at first, as a small file may hold a long text in many rows."""
    table = library.ParquetFile(file)
    columns, rows, longest = chosen(table.schema_arrow.names), _FEW_ROWS, 1
    for group in range(table.num_row_groups):
        for batch in table.iter_batches(batch_size=rows, row_groups=[group], columns=columns):
            longest = max(longest, batch.nbytes // max(batch.num_rows, 1))
            yield batch
        rows = min(max(_BATCH_BYTES // longest, 1), _ROWS)


def _arrow(library: ModuleType, file: BinaryIO, chosen: _Chosen) -> Iterator[Any]:
    """Yield the record batches of an Arrow stream, which an Arrow file has after 8 bytes."""
    if cast("io.BufferedReader", file).peek(len(_ARROW_FILE)).startswith(_ARROW_FILE):
        file.read(len(_ARROW_FILE))
    stream = library.open_stream(file)
    columns = chosen(stream.schema.names)
    for batch in stream:
        found = batch.select(columns)
        found.validate(full=True)  # reading checks no offsets, which may lead anywhere in memory
        yield found


_Chosen: TypeAlias = Callable[[list[str]], list[str]]
_TABLES: dict[str, tuple[str, Callable[[ModuleType, BinaryIO, _Chosen], Iterator[Any]]]] = {
    "parquet": ("pyarrow.parquet", _parquet),
    "arrow": ("pyarrow.ipc", _arrow),
}


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {shorten(twice)} occurs twice")
    return record


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
