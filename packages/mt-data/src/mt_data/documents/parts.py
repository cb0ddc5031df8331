"""Parts of a source: equal shares of its bytes, for several processes or machines."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from mt_files import shorten

from mt_data.documents.source import SourceFile
from mt_data.error import DataError

PART = re.compile(r"([0-9]{1,7})/([0-9]{1,7})", re.ASCII)
MAX_PARTS = 100_000


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of `count` equal shares of a source; the first has number 1."""

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count <= MAX_PARTS:
            raise DataError(
                f"part {self} does not exist; parts are 1/N to N/N, with N of at most {MAX_PARTS}"
            )

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

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
    """Return what of the files belongs to a part; the parts in their order hold every byte once.

    A share is a range of the bytes of all files, one behind the other. A divisible file is cut at
    the ends of the range; any other belongs to the part in whose range it begins.
    """
    sizes = [file.size for file in files]
    total = sum(sizes)
    low, high = (total * number // part.count for number in (part.number - 1, part.number))
    high += part.number == part.count  # the empty files at the end
    mine: list[SourceFile] = []
    start = 0
    for file, size in zip(files, sizes, strict=True):
        begin, end = max(low - start, 0), min(high - start, size)
        if size and divisible(file):
            if begin < end:
                mine.append(replace(file, begin=begin, end=end))
        elif low <= start < high:
            mine.append(file)
        start += size
    return mine


def digest_of(files: Iterable[SourceFile], *how: str) -> str:
    """Return a digest of files' names (without folders) and sizes, and of how they are read.

    Parts with one digest fit together. Of an object in a store its version counts too.
    """
    listed = [
        [PurePath(file.name).name, file.size, *([file.stored.version] if file.stored else [])]
        for file in files
    ]
    return hashlib.sha256(json.dumps([listed, *how]).encode()).hexdigest()
