"""`mt-retro build`: from datasets to a database."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from mt_data import DataError, Part
from mt_files import Progress, absolute_path, say

from mt_retro.building import build_database
from mt_retro.commands.parts import InParts
from mt_retro.database import Database
from mt_retro.vectors import Vectors


@dataclass(frozen=True, kw_only=True)
class Build(InParts):
    """Build a database of the chunks of datasets, or join databases.

    Attributes:
        inputs: Datasets, without ending, and folders of databases.
        out: Folder of the database; required. A killed build goes on in it.
        embeddings: Folders with the vectors of datasets; without them the built-in embedding makes
            vectors, by runs of tokens.
        index: How chunks are searched: exact, a factory string of faiss such as IVF1024,Flat, or
            auto, which chooses by the number of chunks.
        chunk: Number of tokens in a chunk.
    """

    inputs: tuple[str, ...]
    out: Path | None = None
    embeddings: tuple[Path, ...] = ()
    index: str = "exact"
    chunk: int = 64

    def run(self) -> None:
        """Run the command."""
        if self.out is None or not self.inputs:
            raise DataError("datasets and --out are required: mt-retro build PREFIX ... --out DB")
        here = replace(
            self,
            inputs=tuple(map(absolute_path, self.inputs)),
            out=self.out.absolute(),
            embeddings=tuple(folder.absolute() for folder in self.embeddings),
        )
        database = self.made(here.make, "mt-retro build")
        if database is None:
            say(f"{self.out}: part {self.part} is there, and others are missing")
            return
        count = len(database.sources)
        say(f"{self.out}: {len(database)} chunks of {database.chunk} tokens, {count} datasets")
        say(f"embedded by {database.record.embedding}")
        index = database.record.index
        say(f"searched by {'comparing all' if index is None else index.factory}")

    def make(self, part: Part | None, progress: Progress) -> Database | None:
        """Build a part, or the database; None if other parts are missing."""
        return build_database(
            self.inputs,
            cast(Path, self.out),
            chunk=self.chunk,
            embedding=[Vectors(folder) for folder in self.embeddings] or None,
            index=self.index,
            part=part,
            progress=progress,
        )
