"""`mt-retro query`: the neighbours of every chunk of a dataset."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from mt_data import DataError, IndexedDataset, Part
from mt_files import Progress, absolute_path, say

from mt_retro.commands.parts import InParts
from mt_retro.database import Database
from mt_retro.query import Neighbours, find_neighbours
from mt_retro.vectors import Vectors


@dataclass(frozen=True, kw_only=True)
class Query(InParts):
    """Find the neighbours of every chunk of a dataset in a database, and store them.

    Attributes:
        database: Folder of the database.
        data: The dataset, without ending; required.
        out: Folder of the neighbours; required. A killed query goes on in it.
        neighbours: Number of neighbours of a chunk.
        max_overlap: Leave out neighbours that repeat a larger share, in [0, 1), of a chunk and the
            next one of its document.
        embeddings: Folder with the vectors of the dataset, if the database was built with vectors
            from elsewhere and is not of this dataset.
    """

    database: Path
    data: str | None = None
    out: Path | None = None
    neighbours: int = 2
    max_overlap: float | None = None
    embeddings: Path | None = None

    def run(self) -> None:
        """Run the command."""
        if self.data is None or self.out is None:
            raise DataError(
                "--data and --out are required: mt-retro query DB --data PREFIX --out N"
            )
        here = replace(
            self,
            database=self.database.absolute(),
            data=absolute_path(self.data),
            out=self.out.absolute(),
            embeddings=None if self.embeddings is None else self.embeddings.absolute(),
        )
        found = self.made(here.make, "mt-retro query")
        if found is None:
            say(f"{self.out}: part {self.part} is there, and others are missing")
            return
        missing = found.count_missing()
        say(f"{self.out}: {self.neighbours} neighbours of {len(found)} chunks, {missing} missing")

    def make(self, part: Part | None, progress: Progress) -> Neighbours | None:
        """Find the neighbours of a part, or of all chunks; None if other parts are missing."""
        return find_neighbours(
            Database(self.database),
            IndexedDataset(cast(str, self.data)),
            cast(Path, self.out),
            neighbours=self.neighbours,
            max_overlap=self.max_overlap,
            embedding=None if self.embeddings is None else Vectors(self.embeddings),
            part=part,
            progress=progress,
        )
