"""Building a dataset, or a part of a dataset, in this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mt_files import Progress, say
from mt_tokenizer import Encoder, Tokenizer

from mt_data.corpus import CorpusStats, build_corpus, prefixes
from mt_data.documents.parts import Part
from mt_data.documents.reader import Document, DocumentReader, read_documents
from mt_data.documents.records import Format
from mt_data.documents.split import HeldOut
from mt_data.error import DataError, DataFileError

SHOWN = 20


class Skipped:
    """Number of skipped lines and files, and the errors of the first few."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[DataFileError] = []

    def add(self, error: DataFileError) -> None:
        """Count a skipped line or file, and keep its error if it is among the first."""
        self.count += 1
        if len(self.first) < SHOWN:
            self.first.append(error)

    def join(self, other: Skipped) -> None:
        """Add the counts of another part."""
        self.count += other.count
        self.first += other.first[: SHOWN - len(self.first)]

    def say(self) -> None:
        """Print the first errors to standard error."""
        for error in self.first:
            say(f"skipped {error}", stream=sys.stderr)
        if self.count > len(self.first):
            say(f"skipped {self.count - len(self.first)} more", stream=sys.stderr)


@dataclass(frozen=True, kw_only=True)
class Built:
    """The result of a build.

    Attributes:
        stats: Counts of the dataset.
        skipped: Skipped lines and files.
        encoder: Name of the encoding library.
    """

    stats: CorpusStats
    skipped: Skipped
    encoder: str


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A build: its sources, how they are read, and its result; see `mt_data.commands.build`."""

    out: Path
    sources: tuple[str, ...]
    key: str
    glob: str
    format: Format
    skip_bad: bool
    workers: int
    overwrite: bool
    part: Part | None = None
    held_out: HeldOut | None = None

    @property
    def prefixes(self) -> list[str]:
        """The prefixes to write: with held-out documents a second one for them."""
        return prefixes(self.out, self.held_out)

    def reader(self, skipped: Skipped) -> DocumentReader:
        """Open the sources, or a part of them."""
        return read_documents(
            self.sources,
            key=self.key,
            glob=self.glob,
            format=self.format,
            on_error=skipped.add if self.skip_bad else None,
            part=self.part,
        )

    def some(self, documents: DocumentReader, skipped: Skipped) -> Iterator[Document]:
        """Yield the documents; raise an error if there is none."""
        first = next(documents, None)
        name = " ".join(self.sources)
        if first is None and skipped.count:
            raise DataError(
                f"{name}: has no readable document; the first of {skipped.count} skipped is "
                f"{skipped.first[0]}"
            )
        if first is None:
            raise DataError(f"{name}: has no document; give a source with text")
        yield first
        yield from documents

    def build(self, tokenizer: Tokenizer, progress: Progress) -> Built:
        """Build the dataset, or its part, with `workers` processes that encode."""
        skipped = Skipped()
        reader = self.reader(skipped)
        try:
            with Encoder(tokenizer, workers=self.workers) as encoder:
                stats = build_corpus(
                    self.some(reader, skipped) if self.part is None else reader,
                    self.out,
                    tokenizer,
                    overwrite=self.overwrite,
                    encoder=encoder,
                    held_out=self.held_out,
                    on_progress=lambda stats: progress.update(
                        "encoding", reader.read_bytes, reader.total_bytes, tokens=stats.tokens
                    ),
                )
        finally:
            progress.clear()
        why = "" if encoder.obstacle is None else f"; no faster one: {encoder.obstacle}"
        return Built(stats=stats, skipped=skipped, encoder=f"{encoder.library}{why}")
