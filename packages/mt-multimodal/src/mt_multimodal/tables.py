"""Parquet files whose rows have images: their bytes, or their paths."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mt_data import DataError, DataFileError, read_lines
from mt_files import require, shorten

from mt_multimodal.decoding import ImageLimits
from mt_multimodal.ranges import Ranges, open_ranges
from mt_multimodal.sources import FileImages, ImageSample, sample_of

_COLUMNS = ("images", "image")
_ROWS, _DIGEST, _REASON = 16, 16, 300
_MOST_GROUP = 1 << 31
_BY_PATH = -1


class TableImages(FileImages):
    """Samples of a parquet file with a column `images` or `image`.

    A cell has bytes, a path, or both as `datasets` writes them (`bytes` and `path`), or a list of
    these. `samples` reads the file once to its end. Later the bytes of a row are read with its row
    group, and the last two groups are kept; each image is compared with its digest.

    Args:
        path: The file, or its URL in an object store.
        folder: Folder of the images that cells name; by default the file's folder.
    """

    def __init__(
        self, path: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__(path, folder)
        self._ranges = open_ranges(path)
        self._lock = threading.Lock()
        # For each image: group, row of the group, number in the row; the group of a path is -1.
        self._places, self._digests = array("q"), bytearray()
        self._kept: dict[int, Any] = {}
        with self._errors():
            self._file = require("pyarrow.parquet", f"reading {path}").ParquetFile(
                _File(self._ranges)
            )
            names = self._file.schema_arrow.names
        self._column = next((each for each in _COLUMNS if each in names), None)

    def samples(self) -> Iterator[ImageSample]:
        """Yield the samples in order."""
        digest = hashlib.sha256()
        lines = read_lines(self.path)
        if self._column is None:
            yield from super().samples()
            return
        with self._errors():
            for group, row, cells in self._cells():
                where, line = next(lines)
                first = len(self._names)
                for number, cell in enumerate(cells):
                    self._add(where, cell, (group, row, number))
                digest.update(line + b"\n" + self._digests[_DIGEST * first :])
                yield sample_of(where, line, tuple(range(first, len(self._names))))
        self.fingerprint = digest.hexdigest()

    def named(self, name: str, sample: ImageSample) -> int:
        """Return the number of a file."""
        self._add(sample.where, name, (0, 0, 0))
        return len(self._names) - 1

    def where(self, image: int) -> str:
        """Return the row of an image, or the path of a file."""
        return self._names[image] if self._group(image) >= 0 else super().where(image)

    def read(self, image: int, limits: ImageLimits) -> bytes:
        """Return the content of an image."""
        group = self._group(image)
        if group == _BY_PATH:
            return super().read(image, limits)
        row, number = self._places[3 * image + 1 : 3 * image + 3]
        with self._lock, self._errors():
            if group not in self._kept:
                while len(self._kept) > 1:
                    self._kept.pop(next(iter(self._kept)))
                found = self._file.read_row_group(group, columns=[self._column])
                self._kept[group] = found.column(0)
            content = _content(_listed(self._kept[group][row].as_py())[number])
        where, size = self.where(image), len(content)
        if size > limits.bytes:
            raise DataFileError(where, f"has {size} bytes; at most {limits.bytes} are decoded")
        known = self._digests[_DIGEST * image : _DIGEST * (image + 1)]
        if hashlib.sha256(content).digest()[:_DIGEST] != known:
            raise DataFileError(where, "has another image than when it was opened; open it anew")
        return content

    def _group(self, image: int) -> int:
        return self._places[3 * image]

    def _cells(self) -> Iterator[tuple[int, int, list[Any]]]:
        """Yield the group, the row in the group, and the images of each row."""
        for group in range(self._file.num_row_groups):
            row = total = 0
            for batch in self._file.iter_batches(
                batch_size=_ROWS, row_groups=[group], columns=[self._column]
            ):
                for value in batch.column(0):
                    cells = _listed(value.as_py())
                    total += sum(map(_size, cells))
                    if total > _MOST_GROUP:
                        text = f"row group {group} has more than {_MOST_GROUP} bytes of images"
                        raise DataFileError(self.path, f"{text}; write groups of fewer rows")
                    yield group, row, cells
                    row += 1

    def _add(self, where: str, cell: Any, place: tuple[int, int, int]) -> None:
        """Note the image of a cell: bytes, or a path."""
        content = _content(cell)
        path = cell["path"] if isinstance(cell, dict) and content is None else cell
        if content is not None:
            self._names.append(f"{where}: image {place[2] + 1}")
            self._places.extend(place)
        elif isinstance(path, str):
            self._names.append(self._inside(where, path))
            self._places.extend((_BY_PATH, 0, 0))
        else:
            text = f"has the image {shorten(cell)}; give bytes, or a path"
            raise DataFileError(where, text)
        self._digests += hashlib.sha256(content or b"").digest()[:_DIGEST]

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except DataError:
            raise
        except Exception as error:  # noqa: BLE001 - the library raises several kinds
            reason = str(error)[:_REASON] or type(error).__name__
            raise DataFileError(self.path, f"cannot be read as parquet: {reason}") from None


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _content(cell: Any) -> Any:
    """Return the bytes of a cell; None if it has only a path, or is of another kind."""
    found = cell.get("bytes") if isinstance(cell, dict) else cell
    return found if isinstance(found, bytes) else None


def _size(cell: Any) -> int:
    content = _content(cell)
    return 0 if content is None else len(content)


class _File(io.RawIOBase):
    """A readable file over ranges of bytes."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges, self._at = ranges, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._ranges.size)[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._ranges.size - self._at, 0)
        found = self._ranges.read(self._at, left if size < 0 else min(size, left))
        self._at += len(found)
        return found
