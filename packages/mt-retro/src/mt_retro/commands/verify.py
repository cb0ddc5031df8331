"""`mt-retro verify`: every byte of what this package writes, compared with its digests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mt_data import DataError
from mt_files import say

from mt_retro.database import Database
from mt_retro.query import Neighbours
from mt_retro.stored import kind_of
from mt_retro.vectors import Vectors


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Read databases, neighbours and vectors in full, and compare them with their digests.

    With neighbours their database is read too, and with a database its datasets.

    Attributes:
        folders: The folders.
    """

    folders: tuple[Path, ...]

    def run(self) -> None:
        """Run the command."""
        if not self.folders:
            raise DataError("a folder is required: mt-retro verify FOLDER ...")
        for folder in self.folders:
            kind = kind_of(folder)
            if kind == "vectors":
                vectors = Vectors(folder)
                vectors.verify()
                what = f"{len(vectors)} vectors of {vectors.dim} dims"
            elif kind == "neighbours":
                found = Neighbours(folder)
                found.verify()
                found.database.verify()
                what = f"the neighbours of {len(found)} chunks, and their database"
            else:
                database = Database(folder)
                database.verify()
                what = f"a database of {len(database)} chunks, and its datasets"
            say(f"{folder}: {what} are as they were written")
