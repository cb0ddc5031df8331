"""Building a token dataset from documents."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mt_files import find_object, object_url, shorten
from mt_tokenizer import Encoder, Tokenizer, load_tokenizer
from numpy.typing import NDArray

from mt_data.datasets.windows import TokenRanges
from mt_data.documents.reader import Document, DocumentReader
from mt_data.documents.split import HeldOut
from mt_data.error import DataError, DataFileError
from mt_data.storage.index import token_dtype
from mt_data.storage.indexed import IndexedDataset
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
        held_out: Counts of the dataset of held-out documents, if there is one.
    """

    documents: int
    tokens: int
    bytes: int
    empty_documents: int = 0
    held_out: CorpusStats | None = None

    @property
    def bytes_per_token(self) -> float:
        """Mean number of bytes of text in a token; 0 for an empty corpus."""
        return self.bytes / self.tokens if self.tokens else 0.0


def build_corpus(  # noqa: PLR0913 - options of a build, all by keyword
    documents: Iterable[Document],
    out_prefix: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    append_eod: bool = True,
    overwrite: bool = False,
    encoder: Encoder | None = None,
    on_progress: Callable[[CorpusStats], None] | None = None,
    held_out: HeldOut | None = None,
) -> CorpusStats:
    """Tokenize documents into `<prefix>.bin`, `.idx` and `.json`, with the tokenizer beside them.

    The JSON file records the counts, the tokenizer's sha256 and vocabulary, and the sha256 of
    both data files. Documents stay in order; empty ones are left out and counted.

    Args:
        documents: The documents to write; read once, in batches. If a reader reads one part of a
            source, the part is recorded for `merge_datasets`, and may be empty.
        out_prefix: Path without ending.
        tokenizer: The tokenizer. Its vocabulary decides the width of a stored token, and it is kept
            as `<prefix>.tokenizer.json` (or `.model`).
        append_eod: Whether to put the end-of-document token after each document.
        overwrite: Whether to replace a dataset of that name, unless it is in use.
        encoder: Encoder of the same tokenizer with other options, such as several processes.
        on_progress: Function to call after each batch with the counts so far.
        held_out: Rule by which documents go to a second dataset, `<prefix>-validation`.

    Raises:
        DataError: No document holds text, or none on one side of `held_out`, or there is a dataset
            of that name.
    """
    encoder = encoder or Encoder(tokenizer)
    dtype = token_dtype(tokenizer.vocab_size)
    end = tokenizer.eod_id if append_eod else None
    about: dict[str, object] = {
        "append_eod": append_eod,
        "tokenizer": f".tokenizer{tokenizer.suffix}",
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "eod_token": tokenizer.eod_token,
        "eod_id": tokenizer.eod_id,
    }
    with ExitStack() as stack:
        sides = [
            _Side(stack.enter_context(IndexedWriter(prefix, dtype, overwrite=overwrite)))
            for prefix in prefixes(out_prefix, held_out)
        ]
        for batch, (ids, counts) in encoder.stream(_batches(documents, sides, held_out)):
            _write(sides, batch, ids, counts, end)
            if on_progress is not None:
                on_progress(_stats(sides))
        parts = part_records(documents, held_out)
        for side, part in zip(sides, parts, strict=True):
            side.check(is_part=bool(part))
        stats = _stats(sides)  # the held-out documents are committed first
        for side, part in reversed([*zip(sides, parts, strict=True)]):
            own = side.stats()
            counted = {"bytes": own.bytes, "empty_documents": own.empty_documents}
            kept = {str(about["tokenizer"]): tokenizer.to_bytes()}
            side.writer.finalize({**counted, **about, **part}, beside=kept)
    return stats


def prefixes(out: str | os.PathLike[str], held_out: HeldOut | None) -> list[str]:
    """Return the prefixes that a build writes: with held-out documents a second one for them."""
    name = os.fspath(out)
    return [name] if held_out is None else [name, f"{name}-validation"]


def part_records(
    documents: Iterable[Document], held_out: HeldOut | None
) -> list[dict[str, dict[str, object]]]:
    """Return the record of the part of a source for each dataset of a build; empty for a whole.

    Parts whose records differ in their numbers alone fit together.
    """
    part = documents.part if isinstance(documents, DocumentReader) else None
    if held_out is None:
        return [{} if part is None else {"part": {**part}}]
    rule = {"fraction": held_out.fraction, "seed": held_out.seed, "by": held_out.by}
    return [
        {} if part is None else {"part": {**part, "held_out": {**rule, "is_held_out": side}}}
        for side in (False, True)
    ]


class _Side:
    """One of the datasets of a build."""

    def __init__(self, writer: IndexedWriter) -> None:
        self.writer = writer
        self.bytes = self.empty = 0
        self._first_empty: Document | None = None

    def leave_out(self, document: Document) -> None:
        """Count a document without text."""
        self._first_empty = self._first_empty or document
        self.empty += 1

    def check(self, *, is_part: bool) -> None:
        """Refuse a whole dataset without documents."""
        if not self.writer.num_documents and not is_part:
            raise _no_text(Path(self.writer.prefix).name, self.empty, self._first_empty)

    def stats(self) -> CorpusStats:
        """Return the counts so far."""
        return CorpusStats(
            documents=self.writer.num_documents,
            tokens=self.writer.num_tokens,
            bytes=self.bytes,
            empty_documents=self.empty,
        )


class _Batch(NamedTuple):
    """The side and the number of bytes of each text of a batch."""

    sides: list[int]
    sizes: list[int]


def _batches(
    documents: Iterable[Document], sides: Sequence[_Side], held_out: HeldOut | None
) -> Iterator[tuple[_Batch, list[str]]]:
    """Yield batches of texts; they keep cores busy and memory bounded."""
    texts: list[str] = []
    batch, total = _Batch([], []), 0
    for document in documents:
        text = document.text
        size = len(text) if text.isascii() else _utf8_size(document)
        side = int(held_out is not None and held_out.holds_out(document))
        if not text:
            sides[side].leave_out(document)
            continue
        texts.append(text)
        batch.sides.append(side)
        batch.sizes.append(size)
        total += size
        if len(texts) >= BATCH_DOCUMENTS or total >= BATCH_BYTES:
            yield batch, texts
            texts, batch, total = [], _Batch([], []), 0
    if texts:
        yield batch, texts


def _write(
    sides: Sequence[_Side],
    batch: _Batch,
    ids: NDArray[np.integer],
    counts: NDArray[np.int64],
    end: int | None,
) -> None:
    """Write the documents of a batch, each to its side and with its end-of-document token."""
    if end is not None:
        ids, counts = np.insert(ids, np.cumsum(counts), end), counts + 1
    if len(sides) == 1:
        sides[0].writer.add_documents(ids, counts)
        sides[0].bytes += sum(batch.sizes)
        return
    of, sizes = np.array(batch.sides), np.array(batch.sizes)
    for number, side in enumerate(sides):
        mine = of == number
        side.writer.add_documents(ids[np.repeat(mine, counts)], counts[mine])
        side.bytes += int(sizes[mine].sum())


def _stats(sides: Sequence[_Side]) -> CorpusStats:
    held_out = sides[1].stats() if len(sides) > 1 else None
    return replace(sides[0].stats(), held_out=held_out)


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
        path = find_object(beside).cached() if object_url(beside) else beside
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
        "held-out part, hold out another share (mt-data build --held-out; data.validation_fraction "
        "in a run's YAML file)"
    )
