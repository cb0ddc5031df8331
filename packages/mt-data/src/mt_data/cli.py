"""The `mt-data` command: build a token dataset, look into it, count it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mt_data.corpus import build_corpus
from mt_data.document import Document, read_documents
from mt_data.error import DataError, DataFileError, MissingExtraError, require
from mt_data.gpt import GPTDataset
from mt_data.indexed import IndexedDataset
from mt_data.tokenizer import Tokenizer, load_tokenizer
from mt_data.training import train_tokenizer

USAGE_ERROR = 2
QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.99, 1.0)


@dataclass(frozen=True, kw_only=True)
class Build:
    """Build PREFIX.bin, .idx and .json from a .jsonl file, a text file or a folder.

    Attributes:
        source: A .jsonl or .ndjson file, a plain text file, or a folder of files.
        prefix: Where to write, without ending.
        tokenizer: An existing tokenizer.json. Left out, one is trained on the source and saved
            as PREFIX.tokenizer.json.
        vocab_size: Size of a trained tokenizer.
        pattern: How a trained tokenizer cuts text: gpt2, code, or a regular expression.
        key: JSON field that holds the text.
        glob: Which files of a folder to read.
        skip_bad: Leave out lines and files that cannot be read, and count them.
    """

    source: Path
    prefix: Path
    tokenizer: Path | None = None
    vocab_size: int = 8192
    pattern: str = "gpt2"
    key: str = "text"
    glob: str = "**/*"
    skip_bad: bool = False

    def run(self) -> None:
        """Run the command."""
        tokenizer = self._tokenizer()
        skipped: list[DataFileError] = []
        stats = build_corpus(self._documents(skipped), self.prefix, tokenizer)
        for error in skipped:
            _say(f"skipped {error}", stream=sys.stderr)
        _say(f"{self.prefix}.bin, .idx: {stats.documents} documents, {stats.tokens} tokens")
        _say(f"{stats.bytes} bytes of text, {stats.bytes_per_token:.3f} bytes per token")
        _say(f"left out: {stats.empty_documents} empty, {len(skipped)} unreadable")

    def _documents(self, skipped: list[DataFileError]) -> Iterator[Document]:
        on_error = skipped.append if self.skip_bad else None
        documents = read_documents(self.source, key=self.key, glob=self.glob, on_error=on_error)
        first = next(documents, None)
        if first is None and skipped:
            raise DataError(
                f"{self.source}: holds no document that can be read; of {len(skipped)} skipped, "
                f"the first is {skipped[0]}"
            )
        if first is None:
            raise DataError(f"{self.source}: holds no document; give a source with text")
        yield first
        yield from documents

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is not None:
            return load_tokenizer(self.tokenizer)
        texts = (document.text for document in self._documents([]))
        tokenizer = train_tokenizer(texts, self.vocab_size, pattern=self.pattern)
        path = _tokenizer_path(self.prefix)
        tokenizer.save(path)
        _say(f"{path}: {tokenizer.vocab_size} tokens")
        return tokenizer


@dataclass(frozen=True, kw_only=True)
class Peek:
    """Print decoded documents, or training samples when a sequence length is given.

    Attributes:
        prefix: The dataset, without ending.
        tokenizer: Its tokenizer.json; PREFIX.tokenizer.json when left out.
        start: First document or sample to print.
        count: How many to print.
        sequence_length: Print samples of this length instead of documents.
        seed: Seed of the sample order.
        max_characters: Longest text to print for each.
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
        tokenizer = load_tokenizer(self.tokenizer or _tokenizer_path(self.prefix))
        with IndexedDataset(self.prefix) as dataset:
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `mt-data`; exits with 2 and one message when something is wrong."""
    try:
        tyro = require("tyro", "cli", "the mt-data command")
        command = tyro.extras.subcommand_cli_from_dict(
            {"build": Build, "peek": Peek, "stats": Stats},
            prog="mt-data",
            description=__doc__,
            args=arguments,
            config=(tyro.conf.PositionalRequiredArgs, tyro.conf.FlagCreatePairsOff),
        )
        command.run()
    except (DataError, MissingExtraError, OSError, IndexError) as error:
        _say(f"mt-data: {_sentence(error)}", stream=sys.stderr)
        raise SystemExit(USAGE_ERROR) from None


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _tokenizer_path(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.tokenizer.json")


def _say(text: str, *, stream: Any = None) -> None:
    (stream or sys.stdout).write(text + "\n")
