"""Parts of a source: equal shares of its bytes, for several processes or machines."""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import PurePath

from mt_files import shorten

from mt_data.documents.source import SourceFile
from mt_data.error import DataError

PART = re.compile(r"([0-9]{1,7})/([0-9]{1,7})", re.ASCII)
MAX_PARTS = 100_000


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of `count` equal shares of a source; the first has number 1.

    Attributes:
        number: Number of the part.
        count: Number of parts.
        blocks: Number of ranges of bytes in a part. With one, the parts in their order are the
            source. With more, the ranges are drawn from the whole source, so that each part is a
            sample of it; then the lines of its documents have no numbers.
    """

    number: int
    count: int
    blocks: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count <= MAX_PARTS:
            raise DataError(
                f"part {self} does not exist; parts are 1/N to N/N, with N of at most {MAX_PARTS}"
            )
        if not 1 <= self.blocks <= MAX_PARTS // self.count:
            raise DataError(
                f"{self.count} parts of {self.blocks} blocks; choose 1 to {MAX_PARTS} in all"
            )

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def record(self) -> dict[str, int]:
        """The record of this part in a dataset."""
        record = asdict(self)
        return record if self.blocks > 1 else {k: v for k, v in record.items() if k != "blocks"}

    def ranges(self, total: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the part, in order, of a source of `total` bytes."""
        count = self.count * self.blocks
        drawn = range(self.number - 1, self.number)
        if self.blocks > 1:
            shuffled = sorted(range(count), key=_draw)
            drawn = sorted(shuffled[self.number - 1 :: self.count])
        for block in drawn:
            low, high = total * block // count, total * (block + 1) // count
            yield low, high + (block + 1 == count)  # the empty files at the end

    @classmethod
    def parse(cls, text: str) -> Part:
        """Read a part as people write it: `3/16`."""
        match = PART.fullmatch(text)
        if match is None:
            raise DataError(f"a part is written like 3/16, the third of 16, not {shorten(text)}")
        return cls(number=int(match[1]), count=int(match[2]))


def cut(
    files: Sequence[SourceFile], part: Part, divisible: Callable[[SourceFile], bool]
) -> list[SourceFile]:
    """Return the files, or ranges of them, of a part; the parts in order hold every byte once.

    A share is one range, or several, of the bytes of all files, one after the other. A divisible
    file is cut at the ends of a range; any other belongs to the part with the file's first byte.
    """
    sizes = [file.size for file in files]
    ends = list(accumulate(sizes, initial=0))
    starts, mine = ends[:-1], []
    for low, high in part.ranges(ends[-1]):
        first = max(bisect_left(starts, low) - 1, 0)  # the file that the range begins in
        for at in range(first, bisect_left(starts, high)):
            file, start, size = files[at], starts[at], sizes[at]
            begin, end = max(low - start, 0), min(high - start, size)
            if size and divisible(file):
                if begin < end:
                    is_numbered = part.blocks == 1
                    mine.append(replace(file, begin=begin, end=end, is_numbered=is_numbered))
            elif low <= start < high:
                mine.append(file)
    return mine


def _draw(block: int) -> bytes:
    return hashlib.blake2b(f"block {block}".encode(), digest_size=16).digest()


def digest_of(files: Iterable[SourceFile], *how: str) -> str:
    """Return a digest of files' names (without folders) and sizes, and of how they are read.

    Parts with one digest fit together. The digest includes the version of an object in a store.
    """
    listed = [
        [PurePath(file.name).name, file.size, *([file.stored.version] if file.stored else [])]
        for file in files
    ]
    return hashlib.sha256(json.dumps([listed, *how]).encode()).hexdigest()
