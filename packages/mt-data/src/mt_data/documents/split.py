"""Division of data into training, validation and test parts."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path, PurePath
from typing import Literal

from mt_files import shorten

from mt_data.documents.reader import Document
from mt_data.error import DataError

PART = re.compile(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", re.ASCII)
PARTS = 3


def parse_split(text: str) -> tuple[float, float, float]:
    """Parse a split string such as `969,30,1` into fractions for train, validation and test.

    It has one to three numbers >= 0, separated by commas; missing ones are 0. Anything else is an
    error (Megatron extracts the digits of any string and reads `-5` as 5).

    Returns:
        Three fractions that sum to 1.
    """
    if not isinstance(text, str):
        raise DataError(f"a split is text like '969,30,1', not {shorten(text)}")
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not PART.fullmatch(part)]
    if wrong or len(parts) > PARTS:
        raise DataError(
            f"split {text!r} must be one to three numbers of 0 or more, separated by commas, "
            f"like '969,30,1'" + (f"; {wrong[0]!r} is not one" if wrong else "")
        )
    weights = [float(part) for part in parts] + [0.0] * (PARTS - len(parts))
    total = sum(weights)
    if not 0 < total < float("inf"):
        raise DataError(f"split {text!r} sums to {total}; it must be finite and above 0")
    train, validation, test = (weight / total for weight in weights)
    return train, validation, test


def split_ranges(text: str, count: int) -> list[range | None]:
    """Divide `count` sequences by a split string, in order and without overlap.

    Returns:
        Three ranges; None for a part of fraction 0.
    """
    fractions = parse_split(text)
    bounds = [round(total * count) for total in accumulate(fractions, initial=0.0)]
    return [
        range(begin, end) if fraction else None
        for fraction, begin, end in zip(fractions, bounds, bounds[1:], strict=False)
    ]


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A rule that holds out a share of documents, each independently of all others.

    A hash of the document and the seed, read as a number in [0, 1), is its place; a document is
    held out if its place is at most `fraction`. So the parts of a source, in any order, are divided
    like the whole source.

    Attributes:
        fraction: Expected share of documents to hold out, between 0 and 1 exclusive.
        seed: Seed of the choice.
        by: Part of a document to hash: the content, so that copies of a text stay together, or the
            name, which is the path with the line.
        root: Folder that names are relative to.
    """

    fraction: float = 0.05
    seed: int = 0
    by: Literal["content", "name"] = "content"
    root: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise DataError(
                f"the share to hold out is {self.fraction}; it must lie between 0 and 1"
            )

    def place(self, document: Document) -> float:
        """Return the place of a document in [0, 1)."""
        if self.by == "content":
            return _place(document.text, self.seed)
        name = PurePath(f"{document.path}:{document.line or 0}")
        return _place(name.relative_to(self.root).as_posix(), self.seed)

    def holds_out(self, document: Document) -> bool:
        """Return whether a document is held out."""
        return self.place(document) <= self.fraction

    def fitted(self, documents: Iterable[Document]) -> HeldOut:
        """Return the rule with the nearest share that leaves documents on both sides.

        Args:
            documents: All documents, of two different places or more; they are read one by one.
        """
        low, high = 1.0, 0.0
        for document in documents:
            place = self.place(document)
            low, high = min(low, place), max(high, place)
        return replace(self, fraction=_between(self.fraction, low, high))


def cut_document(document: Document, *, fraction: float = 0.05) -> tuple[Document, Document]:
    """Return the beginning of a document, and its last lines, which are the share to hold out."""
    text = document.text
    place = round(len(text) * (1 - fraction))
    place = text.rfind("\n", 0, place) + 1 or place
    return replace(document, text=text[:place]), replace(document, text=text[place:])


def split_files(
    paths: Sequence[str | os.PathLike[str]],
    *,
    fraction: float = 0.05,
    seed: int = 0,
    root: str | os.PathLike[str] | None = None,
) -> tuple[list[Path], list[Path]]:
    """Hold out a share of the files, chosen by a hash of their names.

    Whether a file is held out depends only on the seed and its name relative to `root`, so adding
    or removing files does not affect other files. (Only if one side would be empty, the nearest
    file is moved there.)

    Args:
        paths: The files; both results keep their order.
        fraction: Expected share of the files to hold out, between 0 and 1 exclusive.
        seed: Seed of the choice.
        root: Folder that names are relative to; None means the common folder of the paths.

    Returns:
        (kept, held out)
    """
    HeldOut(fraction=fraction)  # refuses what is no share
    files = [Path(path) for path in paths]
    if len(files) < 2:
        raise DataError(f"cannot hold out a part of {len(files)} files; pass at least 2")
    base = Path(root) if root is not None else Path(os.path.commonpath([f.parent for f in files]))
    places = [_place(file.relative_to(base).as_posix(), seed) for file in files]
    share = _between(fraction, min(places), max(places))
    held = [place <= share for place in places]
    kept = [file for file, out in zip(files, held, strict=True) if not out]
    return kept, [file for file, out in zip(files, held, strict=True) if out]


def _between(fraction: float, low: float, high: float) -> float:
    """Return the share nearest to a fraction, from the lowest place to just below the highest."""
    return min(max(fraction, low), math.nextafter(high, 0))


def _place(name: str, seed: int) -> float:
    """Return a pseudo-random number in [0, 1) from a name and a seed."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(errors="surrogateescape"), digest_size=7)
    return int.from_bytes(digest.digest(), "big") / 2**56
