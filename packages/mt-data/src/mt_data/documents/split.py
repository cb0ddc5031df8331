"""Division of data into training, validation and test parts."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

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
    if not 0 < fraction < 1:
        raise DataError(f"fraction is {fraction}; it must lie between 0 and 1")
    files = [Path(path) for path in paths]
    if len(files) < 2:
        raise DataError(f"cannot hold out a part of {len(files)} files; pass at least 2")
    base = Path(root) if root is not None else Path(os.path.commonpath([f.parent for f in files]))
    places = [_place(file.relative_to(base).as_posix(), seed) for file in files]
    threshold = min(max(fraction, min(places)), max(places))
    held = [place <= threshold and place < max(places) for place in places]
    kept = [file for file, out in zip(files, held, strict=True) if not out]
    return kept, [file for file, out in zip(files, held, strict=True) if out]


def split_documents(
    documents: Sequence[Document], *, fraction: float = 0.05, seed: int = 0
) -> tuple[list[Document], list[Document]]:
    """Hold out a share of documents, chosen as by `split_files`.

    Documents of one file share a path, so the line belongs to the name. Of a single document the
    end is held out, from the start of a line on.

    Returns:
        (kept, held out)
    """
    if len(documents) == 1:
        only, text = documents[0], documents[0].text
        cut = text.rfind("\n", 0, round(len(text) * (1 - fraction))) + 1
        cut = cut or round(len(text) * (1 - fraction))
        return [replace(only, text=text[:cut])], [replace(only, text=text[cut:])]
    names = [f"{document.path}:{document.line or 0}" for document in documents]
    held = {str(name) for name in split_files(names, fraction=fraction, seed=seed)[1]}
    parts: tuple[list[Document], list[Document]] = [], []
    for name, document in zip(names, documents, strict=True):
        parts[name in held].append(document)
    return parts


def _place(name: str, seed: int) -> float:
    """Return a pseudo-random number in [0, 1) from a name and a seed."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(errors="surrogateescape"), digest_size=7)
    return int.from_bytes(digest.digest(), "big") / 2**56
