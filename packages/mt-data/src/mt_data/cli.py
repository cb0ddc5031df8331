"""The `mt-data` command: build and inspect token datasets."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from mt_files import MissingExtraError, UserError, require, shorten
from mt_tokenizer import Encoder, Tokenizer, load_tokenizer, train_tokenizer

from mt_data.corpus import build_corpus, dataset_tokenizer
from mt_data.datasets.gpt import GPTDataset
from mt_data.documents.reader import Document, DocumentReader, Format, read_documents
from mt_data.documents.source import STANDARD_INPUT
from mt_data.error import DataError, DataFileError
from mt_data.progress import Progress
from mt_data.storage.indexed import IndexedDataset, check_prefix
from mt_data.storage.writer import check_free

USAGE_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
SHOWN = 20
QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.99, 1.0)


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
        progress = Progress(shown=self.progress or _is_terminal(sys.stderr))
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
        _say(f"{self.out}.bin, .idx: {stats.documents} documents, {stats.tokens} tokens")
        _say(f"{stats.bytes} bytes of text, {stats.bytes_per_token:.3f} bytes per token")
        _say(f"left out: {stats.empty_documents} empty, {skipped.count} unreadable")
        _say(f"documents end with {tokenizer.eod_token} (id {tokenizer.eod_id})")
        why = "" if encoder.obstacle is None else f"; not by gigatoken: {encoder.obstacle}"
        _say(f"encoded by {encoder.library}{why}")

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
            _say(f"skipped {error}", stream=sys.stderr)
        if self.count > len(self.first):
            _say(f"skipped {self.count - len(self.first)} more", stream=sys.stderr)


@dataclass(frozen=True, kw_only=True)
class Peek:
    """Print decoded documents, or training samples if a sequence length is given.

    Attributes:
        prefix: The dataset, without ending.
        tokenizer: Its tokenizer; by default the file beside the dataset.
        start: First document or sample to print.
        count: Number of documents or samples to print.
        sequence_length: Print samples of this length instead of documents.
        seed: Seed of the sample order.
        max_characters: Largest number of characters to print for each.
    """

    prefix: Path
    tokenizer: Path | None = None
    start: int = 0
    count: int = 3
    sequence_length: int | None = None
    seed: int = 0
    max_characters: int = 400

    def run(self) -> None:
        """Run the command."""
        with IndexedDataset(self.prefix) as dataset:
            tokenizer = dataset_tokenizer(dataset, self.tokenizer)
            if self.sequence_length is None:
                noun, total, get = "document", dataset.num_documents, dataset.document
            else:
                samples = GPTDataset(dataset, sequence_length=self.sequence_length, seed=self.seed)
                noun, total, get = "sample", len(samples), samples.__getitem__
            if not 0 <= self.start < total:
                raise DataError(f"{noun} {self.start} does not exist; there are {total}")
            for index in range(self.start, min(self.start + self.count, total)):
                tokens = get(index)
                text = tokenizer.decode(tokens)
                _say(f"--- {noun} {index} of {total}: {len(tokens)} tokens")
                _say(text[: self.max_characters])


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Print counts of a dataset.

    Attributes:
        prefix: The dataset, without ending.
        verify: Also compare the files with their recorded sha256.
    """

    prefix: Path
    verify: bool = False

    def run(self) -> None:
        """Run the command."""
        with IndexedDataset(self.prefix) as dataset:
            _say(f"documents  {dataset.num_documents}")
            _say(f"sequences  {len(dataset)}")
            _say(f"tokens     {dataset.num_tokens} of {dataset.dtype.name}")
            recorded = dataset.metadata() or {}
            if isinstance(end := recorded.get("eod_token"), str):
                _say(f"tokenizer  {recorded.get('vocab_size')} tokens, documents end with {end}")
            text_bytes = recorded.get("bytes")
            if isinstance(text_bytes, int) and dataset.num_tokens:
                ratio = text_bytes / dataset.num_tokens
                _say(f"bytes      {text_bytes} of text, {ratio:.3f} per token")
            if len(dataset):
                lengths = np.quantile(dataset.lengths, QUANTILES, method="nearest")
                parts = [f"{at:.0%} {int(n)}" for at, n in zip(QUANTILES, lengths, strict=True)]
                _say("lengths    " + ", ".join(parts) + " (tokens of a sequence, by quantile)")
            if self.verify:
                dataset.verify()
                _say("verified   both files match their recorded sha256")


COMMANDS = {"build": Build, "peek": Peek, "stats": Stats}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `mt-data`; exits with 2 and one message on an error.

    Ctrl-C ends it with 130 and leaves nothing behind; a closed output pipe ends it quietly.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The rest of the buffer has no reader; without this Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(BROKEN_PIPE) from None
    except KeyboardInterrupt:
        _say("mt-data: interrupted; nothing was written", stream=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except (UserError, MissingExtraError, OSError, IndexError, MemoryError) as error:
        _say(f"mt-data: {_sentence(error)}", stream=sys.stderr)
        raise SystemExit(USAGE_ERROR) from None


def _run(arguments: list[str]) -> None:
    if arguments == ["--version"]:
        _say(f"mt-data {version('mt-data')}")
        return
    command = arguments[0] if arguments else ""
    if command and not command.startswith("-") and command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else f"; choose one of {', '.join(COMMANDS)}"
        raise DataError(f"there is no command {shorten(command)}{hint}")
    tyro = require("tyro", "the mt-data command")
    parsed = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="mt-data",
        description=__doc__,
        args=arguments,
        config=(tyro.conf.PositionalRequiredArgs, tyro.conf.FlagCreatePairsOff),
    )
    parsed.run()


def _sentence(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "there is not enough memory"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _is_terminal(stream: Any) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


def _say(text: str, *, stream: Any = None) -> None:
    """Write a line; characters that the console can't show are escaped."""
    stream = stream or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
