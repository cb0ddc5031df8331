"""Files to read documents from: named, found in folders or by globs, and decompressed."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any, BinaryIO, cast

import mt_files
from mt_files import (
    StoredObject,
    find_object,
    listed,
    local_path,
    object_url,
    objects_under,
    require,
    shorten,
)

from mt_data.error import DataError, DataFileError

STANDARD_INPUT = "-"
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
Source = str | os.PathLike[str]
_STATE, _SPLITS = "state.json", "dataset_dict.json"
_MOST_STATE = 1 << 24


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file to read.

    Attributes:
        path: Path of the file; None for standard input, and for an object in a store.
        stored: The object in a store.
        name: Name of the file in documents and messages.
        within: The folder in which it was found, which links must not leave.
        begin: First byte of the part, for a file of lines that is read in parts.
        end: End of the part: it has the lines that begin in [begin, end). None means the whole
            file.
        is_numbered: Whether lines are numbered in the file, which needs a read of all bytes before
            `begin`; else they are numbered in the part.
    """

    path: Path | None
    name: str
    stored: StoredObject | None = None
    within: Path | None = None
    begin: int = 0
    end: int | None = None
    is_numbered: bool = True

    def place(self, number: int) -> str:
        """Return the place of a line or record, for messages."""
        if self.is_numbered:
            return f"{self.name}:{number}"
        return f"{self.name}, line {number} from byte {self.begin} on"

    @property
    def ending(self) -> str:
        """The ending of the format in lower case, without the ending of a compression."""
        suffixes = [suffix.lower() for suffix in PurePath(self.name).suffixes]
        if suffixes and suffixes[-1] in COMPRESSED:
            suffixes.pop()
        return suffixes[-1] if suffixes else ""

    @property
    def is_standard_input(self) -> bool:
        """Whether the file is standard input, which can be read only once and has no known size."""
        return self.path is None and self.stored is None

    @property
    def size(self) -> int:
        """Number of bytes to read from disk or the store; 0 if unknown."""
        if self.end is not None:
            return self.end - self.begin
        if self.stored is not None:
            return self.stored.size
        try:
            return 0 if self.path is None else self.path.stat().st_size
        except OSError:
            return 0  # reading the file will report the error

    def open(self) -> BinaryIO:
        """Open the file without decompressing it.

        Raises:
            DataFileError: The path is not a regular file, or lies outside `within`.
        """
        if self.stored is not None:
            return self.stored.open()
        if self.path is None:
            import sys

            return cast("BinaryIO", sys.stdin.buffer)
        try:
            return mt_files.open_file(self.path, within=self.within)
        except mt_files.FileError as error:
            if self.within is None and isinstance(error, FileNotFoundError):
                raise
            raise DataFileError(self.name, error.problem) from None


def find_files(source: Source | Iterable[Source], glob: str) -> list[SourceFile]:
    """Find the files of sources, in a fixed order.

    Args:
        source: A file, a folder, a glob such as `data/*.jsonl`, `-` for standard input, a URL of an
            object store for each of these, or several.
        glob: Pattern of the files to read in a folder.

    Raises:
        DataError: A glob matches nothing, or is invalid.
        FileNotFoundError: There is no such file or folder.
    """
    if isinstance(source, str | os.PathLike):
        return _rows_alone(list(_find(source, glob, alone=True)))
    return [file for one in source for file in _rows_alone(list(_find(one, glob, alone=False)))]


def _rows_alone(files: Sequence[SourceFile]) -> list[SourceFile]:
    """Return files without the descriptions of data sets that `datasets` saved.

    Such a data set is a folder of `.arrow` files, with their names and order in `state.json`;
    several splits are folders beside a `dataset_dict.json`.
    """
    folders: dict[str, dict[str, SourceFile]] = {}
    for file in files:
        folder, _, name = file.name.rpartition("/")
        folders.setdefault(folder, {})[name] = file
    saved = {
        folder: _saved_rows(own[_STATE], own)
        for folder, own in folders.items()
        if _STATE in own and any(file.ending == ".arrow" for file in own.values())
    }
    kept: list[SourceFile] = []
    for file in files:
        folder, _, name = file.name.rpartition("/")
        if folder in saved:
            kept += saved[folder]
            saved[folder] = []
        elif name != _SPLITS or not (splits := _splits(folder, saved)):
            kept.append(file)
        elif len(splits) > 1:
            text = f"has several splits; name the folder of one of {listed(splits)}"
            raise DataFileError(file.name, text)
    return kept


def _splits(folder: str, saved: Iterable[str]) -> list[str]:
    """Return the names of the saved data sets in a folder."""
    places = (each.rpartition("/") for each in saved if each)
    return sorted(name for above, _, name in places if above == folder)


def _saved_rows(state: SourceFile, files: Mapping[str, SourceFile]) -> list[SourceFile]:
    """Return the files with the rows of a data set that `datasets` saved, in their order.

    Args:
        state: The file with the names of the data set's files.
        files: The files of its folder by name; files with rows may be compressed.
    """
    with state.open() as file:
        content = file.read(_MOST_STATE)
    try:
        record = mt_files.parse_json(content, name=state.name)
    except mt_files.FileError as error:
        raise DataFileError(state.name, error.problem) from None
    match record:
        case {"_data_files": list(found)} if not record.get("_indices_data_files"):
            names = [each.get("filename") if isinstance(each, dict) else each for each in found]
        case _:
            raise DataFileError(
                state.name,
                "does not name files of rows in their order; save the data set anew, after "
                "flatten_indices()",
            )
    rows = []
    for name in names:
        found = next((own for end in ("", *COMPRESSED) if (own := files.get(f"{name}{end}"))), None)
        if found is None or found.ending != ".arrow":
            raise DataFileError(state.name, f"names {shorten(name)}, which is not beside it")
        rows.append(found)
    return rows


def _find(source: Source, glob: str, *, alone: bool) -> Iterator[SourceFile]:
    import glob as globbing

    name = local_path(source)
    path = Path(name)
    if (url := object_url(name)) is not None:
        yield from _in_store(url, glob)
    elif name == STANDARD_INPUT:
        yield SourceFile(path=None, name="standard input")
    elif path.is_dir():
        yield from _in_folder(path, glob, alone=alone)
    elif path.exists() or path.is_symlink():
        yield SourceFile(path=path, name=name)
    elif globbing.has_magic(name):
        found = sorted(globbing.glob(name, recursive=True))
        files = [match for match in found if not os.path.isdir(match)]
        if not files:
            raise DataError(f"no file matches {shorten(name)}")
        for match in files:
            yield SourceFile(path=Path(match), name=match)
    else:
        raise FileNotFoundError(f"{name}: no such file or folder")


def _in_folder(folder: Path, glob: str, *, alone: bool) -> Iterator[SourceFile]:
    _check_glob(glob)
    found = ((path.relative_to(folder).as_posix(), path) for path in folder.glob(glob))
    files = sorted((name, path) for name, path in found if path.is_file())
    if not files:
        raise DataError(f"{folder}: no file in this folder matches the glob {shorten(glob)}")
    for name, path in files:
        yield SourceFile(path=path, name=name if alone else f"{folder}/{name}", within=folder)


def _in_store(url: str, glob: str) -> Iterator[SourceFile]:
    """Yield an object, the matches of a glob under a prefix, or the matches of a URL."""
    import glob as globbing

    if globbing.has_magic(url):
        steps = url.split("/")
        fixed = next(number for number, step in enumerate(steps) if globbing.has_magic(step))
        folder, glob = "/".join(steps[:fixed]), "/".join(steps[fixed:])
    else:
        try:
            found = find_object(url)
        except FileNotFoundError:
            folder = url.rstrip("/")
        else:
            yield SourceFile(path=None, name=url, stored=found)
            return
    _check_glob(glob)
    any_object = any_match = False
    for each in objects_under(folder):
        any_object = True
        if _matches(each.url.removeprefix(f"{folder}/").split("/"), glob.split("/")):
            any_match = True
            yield SourceFile(path=None, name=each.url, stored=each)
    if not any_object:
        raise FileNotFoundError(f"{url}: no such object, and no object under this prefix")
    if not any_match:
        raise DataError(f"{folder}: no object under this prefix matches the glob {shorten(glob)}")


def _matches(parts: Sequence[str], steps: Sequence[str]) -> bool:
    """Return whether the parts of a path match the steps of a glob, as in `Path.glob`."""
    if not steps:
        return not parts
    if steps[0] == "**":
        return any(_matches(parts[number:], steps[1:]) for number in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], steps[0]) and _matches(parts[1:], steps[1:])


def _check_glob(glob: str) -> None:
    """Refuse patterns that pathlib refuses, with the same message in all Python versions."""
    parts = PurePath(glob).parts
    stars = any("**" in part and part != "**" for part in parts)
    if stars or not parts or PurePath(glob).is_absolute() or ".." in parts:
        raise DataError(
            f"glob {shorten(glob)} does not select files in a folder; use a relative pattern with "
            "each ** alone between slashes, such as '**/*.py'"
        )


@contextmanager
def decompressed(file: BinaryIO, name: str) -> Iterator[BinaryIO]:
    """Yield a file's content, decompressed if its name has the ending of a compression.

    Raises:
        DataFileError: The content is damaged.
        MissingExtraError: The library for it is not installed.
    """
    ending = PurePath(name).suffix.lower()
    if ending not in COMPRESSED:
        yield file
        return
    reader, errors = _decompressor(file, ending, name)
    try:
        yield cast("BinaryIO", reader)
    except mt_files.FileError:  # of a store
        raise
    except (EOFError, *errors) as error:
        problem = f"cannot be decompressed: {error or 'it ends early'}"
        raise DataFileError(name, problem) from None


def _decompressor(
    file: BinaryIO, ending: str, name: str
) -> tuple[Any, tuple[type[Exception], ...]]:
    if ending == ".gz":
        import gzip
        import zlib

        return gzip.GzipFile(fileobj=file), (gzip.BadGzipFile, zlib.error)
    if ending == ".bz2":
        import bz2

        return bz2.BZ2File(file), (OSError,)
    if ending == ".xz":
        import lzma

        return lzma.LZMAFile(file), (lzma.LZMAError,)
    library = require("zstandard", f"reading {name}")
    stream = library.ZstdDecompressor().stream_reader(file, read_across_frames=True)
    return io.BufferedReader(stream, 1 << 16), (library.ZstdError,)
