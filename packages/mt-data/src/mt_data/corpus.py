"""Building of a token dataset from documents."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mt_files import shorten
from mt_tokenizer import Encoder, Tokenizer, load_tokenizer
from numpy.typing import NDArray

from mt_data.datasets.windows import TokenRanges
from mt_data.documents.reader import Document, DocumentReader
from mt_data.error import DataError, DataFileError
from mt_data.storage.index import token_dtype
from mt_data.storage.indexed import IndexedDataset
from mt_data.storage.objects import find_object, url_of
from mt_data.storage.writer import IndexedWriter

BATCH_DOCUMENTS = 4096
BATCH_BYTES = 1 << 21
KEPT = (".tokenizer.json", ".tokenizer.model")


@dataclass(frozen=True, kw_only=True)
class CorpusStats:
    """Counts of a dataset.

    Attributes:
        documents: Number of documents written.
        tokens: Number of tokens written, including end-of-document tokens.
        bytes: Size of the text in bytes of UTF-8.
        empty_documents: Number of documents left out because they have no text.
    """

    documents: int
    tokens: int
    bytes: int
    empty_documents: int = 0

    @property
    def bytes_per_token(self) -> float:
        """Mean number of bytes of text in a token; 0 for an empty corpus."""
        return self.bytes / self.tokens if self.tokens else 0.0


def build_corpus(
    documents: Iterable[Document],
    out_prefix: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    append_eod: bool = True,
    overwrite: bool = False,
    encoder: Encoder | None = None,
    on_progress: Callable[[CorpusStats], None] | None = None,
) -> CorpusStats:
    """Tokenize documents into `<prefix>.bin`, `.idx` and `.json`, with the tokenizer beside them.

    The JSON file records the counts, the tokenizer's sha256 and vocabulary, and the sha256 of
    both data files. Documents stay in order; empty ones are left out and counted.

    Args:
        documents: The documents to write; read once, in batches. Of a reader of one part of a
            source the part is recorded, for `merge_datasets`, and may be empty.
        out_prefix: Path without ending.
        tokenizer: The tokenizer. Its vocabulary decides the width of a stored token, and it is kept
            as `<prefix>.tokenizer.json` (or `.model`).
        append_eod: Whether to put the end-of-document token after each document.
        overwrite: Whether to replace a dataset of that name, unless it is in use.
        encoder: Encoder of the same tokenizer with other options, such as several processes.
        on_progress: Function to call after each batch with the counts so far.

    Raises:
        DataError: No document holds text, or there is a dataset of that name.
    """
    encoder = encoder or Encoder(tokenizer)
    build = _Build(tokenizer, append_eod=append_eod)
    dtype = token_dtype(tokenizer.vocab_size)
    part = documents.part if isinstance(documents, DocumentReader) else None
    with IndexedWriter(out_prefix, dtype, overwrite=overwrite) as writer:
        for text_bytes, (ids, counts) in encoder.stream(build.batches(documents)):
            build.write(writer, text_bytes, ids, counts)
            if on_progress is not None:
                on_progress(build.stats(writer))
        if writer.num_documents == 0 and part is None:
            raise _no_text(Path(out_prefix).name, build.empty, build.first_empty)
        stats = build.stats(writer)
        kept = f".tokenizer{tokenizer.suffix}"
        writer.finalize(
            {
                "bytes": stats.bytes,
                "empty_documents": stats.empty_documents,
                "append_eod": append_eod,
                "tokenizer": kept,
                "tokenizer_sha256": tokenizer.sha256,
                "vocab_size": tokenizer.vocab_size,
                "eod_token": tokenizer.eod_token,
                "eod_id": tokenizer.eod_id,
                **({} if part is None else {"part": part}),
            },
            beside={kept: tokenizer.to_bytes()},
        )
    return stats


class _Build:
    """The state of building one dataset."""

    def __init__(self, tokenizer: Tokenizer, *, append_eod: bool) -> None:
        self._end = tokenizer.eod_id if append_eod else None
        self._bytes = self.empty = 0
        self.first_empty: Document | None = None

    def batches(self, documents: Iterable[Document]) -> Iterator[tuple[int, list[str]]]:
        """Yield batches of texts with their sizes; they keep cores busy and memory bounded."""
        texts: list[str] = []
        size = 0
        for document in documents:
            if not document.text:
                self.first_empty = self.first_empty or document
                self.empty += 1
                continue
            text = document.text
            texts.append(text)
            size += len(text) if text.isascii() else _utf8_size(document)
            if len(texts) >= BATCH_DOCUMENTS or size >= BATCH_BYTES:
                yield size, texts
                texts, size = [], 0
        if texts:
            yield size, texts

    def write(
        self,
        writer: IndexedWriter,
        text_bytes: int,
        ids: NDArray[np.integer],
        counts: NDArray[np.int64],
    ) -> None:
        """Write the documents of a batch, each with its end-of-document token."""
        if self._end is not None:
            ends = np.cumsum(counts)
            ids, counts = np.insert(ids, ends, self._end), counts + 1
        writer.add_documents(ids, counts)
        self._bytes += text_bytes

    def stats(self, writer: IndexedWriter) -> CorpusStats:
        """Return the counts so far."""
        return CorpusStats(
            documents=writer.num_documents,
            tokens=writer.num_tokens,
            bytes=self._bytes,
            empty_documents=self.empty,
        )


def _utf8_size(document: Document) -> int:
    try:
        return len(document.text.encode())
    except UnicodeEncodeError as error:
        place = document.path if document.line is None else f"{document.path}:{document.line}"
        raise DataFileError(
            place, f"has a lone surrogate at character {error.start}, which is not a character"
        ) from None


def dataset_tokenizer(
    dataset: IndexedDataset, path: str | os.PathLike[str] | None = None
) -> Tokenizer:
    """Load the tokenizer of a dataset, checked against the recorded sha256.

    Args:
        dataset: A dataset from `build_corpus`, or from another tool together with `path`.
        path: The tokenizer's file; None means the file beside the dataset.

    Raises:
        DataFileError: The file has another tokenizer, or was changed.
    """
    record = dataset.metadata() or {}
    kept = str(record.get("tokenizer", ".tokenizer.json"))
    if kept not in KEPT:
        raise DataFileError(f"{dataset.prefix}.json", f"tokenizer is {shorten(kept)}; not {KEPT}")
    if path is None:
        beside = f"{dataset.prefix}{kept}"
        path = find_object(beside).cached() if url_of(beside) else beside
    eod = record.get("eod_token")
    expected = record.get("tokenizer_sha256")
    tokenizer = load_tokenizer(path, eod=eod if isinstance(eod, str) else None)
    if expected not in (None, tokenizer.sha256):
        raise DataFileError(
            os.fspath(path),
            f"is not the tokenizer of {dataset.prefix}.bin: its sha256 is "
            f"{tokenizer.sha256[:12]}..., but {shorten(str(expected)[:12])}... is recorded",
        )
    return tokenizer


def count_text_bytes(indexed: IndexedDataset | TokenRanges, tokenizer: Tokenizer) -> int:
    """Return the size of a dataset's original text in bytes of UTF-8.

    `build_corpus` records it. The documents of a dataset from another tool are decoded, which is
    exact for byte-level tokenizers and approximate for others, because tokens lack some spaces and
    the changes of a normaliser.
    """
    if isinstance(indexed, TokenRanges):
        documents = indexed.documents()
    else:
        recorded = (indexed.metadata() or {}).get("bytes")
        if isinstance(recorded, int) and recorded > 0:
            return recorded
        documents = (indexed.document(number) for number in range(indexed.num_documents))
    return sum(len(tokenizer.decode(ids, skip_special=True).encode()) for ids in documents)


def _no_text(name: str, count: int, first: Document | None) -> DataError:
    """Return the error of a corpus without text."""
    reason = "no document was given"
    if first is not None:
        place = first.path if first.line is None else f"{first.path}:{first.line}"
        reason = f"none of {count} documents has any, the first is {place}"
        if count == 1:
            reason = f"{place} has none"
    return DataError(
        f"there is no text for {name!r}: {reason}; use a corpus with more text, or if this is a "
        "held-out part, hold out another share (data.validation_fraction in a run's YAML file)"
    )
