"""`mt-data build`: from texts to a dataset of tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mt_files import Progress, say
from mt_tokenizer import Encoder, Tokenizer, load_tokenizer, train_tokenizer

from mt_data.corpus import build_corpus
from mt_data.documents.reader import Document, DocumentReader, Format, read_documents
from mt_data.documents.source import STANDARD_INPUT
from mt_data.error import DataError, DataFileError
from mt_data.storage.indexed import check_prefix
from mt_data.storage.writer import check_free

SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class Build:
    """Build a dataset of tokens from texts: OUT.bin, .idx, .json, and the tokenizer beside them.

    Attributes:
        sources: Files (.jsonl, .ndjson, .json, .parquet, or text; also .gz, .zst, .bz2, .xz),
            folders, globs, or - for standard input.
        out: Path of the dataset without ending; required.
        tokenizer: An existing tokenizer.json or sentencepiece .model. Without it, a tokenizer is
            trained on the sources.
        eod: The special token that ends a document, if the tokenizer has none of the usual ones.
        vocab_size: Vocabulary size of a trained tokenizer.
        pattern: Rule by which a trained tokenizer splits text: gpt2, code, or a regular expression.
        key: JSON field or column with the text.
        glob: Pattern of the files to read in a folder.
        format: Format of the files: auto (by their names), jsonl, json, text or parquet.
        skip_bad: Skip unreadable lines and files, and count them.
        overwrite: Replace a dataset of that name, unless it is in use.
        workers: Number of processes that encode.
        progress: Show progress even if standard error is not a terminal.
    """

    sources: tuple[str, ...]
    out: Path | None = None
    tokenizer: Path | None = None
    eod: str | None = None
    vocab_size: int = 8192
    pattern: str = "gpt2"
    key: str = "text"
    glob: str = "**/*"
    format: Format = "auto"
    skip_bad: bool = False
    overwrite: bool = False
    workers: int = 1
    progress: bool = False

    def run(self) -> None:
        """Run the command."""
        if self.out is None or not self.sources:
            raise DataError("sources and --out are required: mt-data build SOURCE ... --out PREFIX")
        check_free(check_prefix(self.out), overwrite=self.overwrite)
        progress = Progress(shown=self.progress or None)
        tokenizer = self._tokenizer(progress)
        skipped = _Skipped()
        reader = self._reader(skipped)
        try:
            with Encoder(tokenizer, workers=self.workers) as encoder:
                stats = build_corpus(
                    self._some(reader, skipped),
                    self.out,
                    tokenizer,
                    overwrite=self.overwrite,
                    encoder=encoder,
                    on_progress=lambda stats: progress.update(
                        "encoding", reader.read_bytes, reader.total_bytes, tokens=stats.tokens
                    ),
                )
        finally:
            progress.clear()
        skipped.say()
        say(f"{self.out}.bin, .idx: {stats.documents} documents, {stats.tokens} tokens")
        say(f"{stats.bytes} bytes of text, {stats.bytes_per_token:.3f} bytes per token")
        say(f"left out: {stats.empty_documents} empty, {skipped.count} unreadable")
        say(f"documents end with {tokenizer.eod_token} (id {tokenizer.eod_id})")
        why = "" if encoder.obstacle is None else f"; not by gigatoken: {encoder.obstacle}"
        say(f"encoded by {encoder.library}{why}")

    def _reader(self, skipped: _Skipped) -> DocumentReader:
        return read_documents(
            self.sources,
            key=self.key,
            glob=self.glob,
            format=self.format,
            on_error=skipped.add if self.skip_bad else None,
        )

    def _some(self, documents: DocumentReader, skipped: _Skipped) -> Iterator[Document]:
        first = next(documents, None)
        name = " ".join(str(source) for source in self.sources)
        if first is None and skipped.count:
            raise DataError(
                f"{name}: has no readable document; the first of {skipped.count} skipped is "
                f"{skipped.first[0]}"
            )
        if first is None:
            raise DataError(f"{name}: has no document; give a source with text")
        yield first
        yield from documents

    def _tokenizer(self, progress: Progress) -> Tokenizer:
        if self.tokenizer is not None:
            return load_tokenizer(self.tokenizer, eod=self.eod)
        if self.eod is not None:
            raise DataError("--eod names a token of --tokenizer; a trained one has <|eod|>")
        if STANDARD_INPUT in self.sources:
            raise DataError(
                "standard input can be read only once, but training a tokenizer reads it too; "
                "give a tokenizer with --tokenizer"
            )
        skipped = _Skipped()
        reader = self._reader(skipped)

        def texts() -> Iterator[str]:
            for document in self._some(reader, skipped):
                progress.update("learning the tokenizer", reader.read_bytes, reader.total_bytes)
                yield document.text

        try:
            return train_tokenizer(texts(), self.vocab_size, pattern=self.pattern)
        finally:
            progress.clear()


class _Skipped:
    """The number of skipped lines and files, and the errors of the first few."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[DataFileError] = []

    def add(self, error: DataFileError) -> None:
        self.count += 1
        if len(self.first) < SHOWN:
            self.first.append(error)

    def say(self) -> None:
        for error in self.first:
            say(f"skipped {error}", stream=sys.stderr)
        if self.count > len(self.first):
            say(f"skipped {self.count - len(self.first)} more", stream=sys.stderr)
