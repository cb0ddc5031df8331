"""From documents to a token dataset."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mt_data.document import Document
from mt_data.error import DataError
from mt_data.index import token_dtype
from mt_data.indexed import IndexedDataset
from mt_data.tokenizer import Tokenizer
from mt_data.writer import IndexedWriter

BATCH_DOCUMENTS = 512
BATCH_CHARACTERS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class CorpusStats:
    """What was written.

    Attributes:
        documents: documents written.
        tokens: tokens written, end-of-document tokens included.
        bytes: text written, in bytes of UTF-8.
        empty_documents: documents left out because they hold no text.
    """

    documents: int
    tokens: int
    bytes: int
    empty_documents: int = 0

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text for each token; 0 for an empty corpus."""
        return self.bytes / self.tokens if self.tokens else 0.0


def build_corpus(
    documents: Iterable[Document],
    out_prefix: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    append_eod: bool = True,
) -> CorpusStats:
    """Tokenize documents into `<prefix>.bin`, `.idx` and `.json`.

    The JSON file records the counts, the tokenizer's sha256 and vocabulary, and the sha256 of
    both data files. Documents stay in order; empty ones are left out and counted.

    Args:
        documents: what to write; read once, in batches.
        out_prefix: path without ending.
        tokenizer: also decides the width of a stored token.
        append_eod: put the end-of-document token after each document.

    Raises:
        DataError: no document holds text.
    """
    end = [tokenizer.eod_id] if append_eod else []
    text_bytes = empty = 0
    first_empty: Document | None = None
    with IndexedWriter(out_prefix, token_dtype(tokenizer.vocab_size)) as writer:
        for batch in _batches(documents):
            encoded = tokenizer.encode_batch([document.text for document in batch])
            for document, ids in zip(batch, encoded, strict=True):
                if not document.text:
                    first_empty = first_empty or document
                    empty += 1
                    continue
                text_bytes += len(document.text.encode())
                writer.add_document(ids + end)
        if writer.num_documents == 0:
            raise _no_text(Path(out_prefix).name, empty, first_empty)
        stats = CorpusStats(
            documents=writer.num_documents,
            tokens=writer.num_tokens,
            bytes=text_bytes,
            empty_documents=empty,
        )
        writer.finalize(
            {
                "bytes": stats.bytes,
                "empty_documents": stats.empty_documents,
                "append_eod": append_eod,
                "tokenizer_sha256": tokenizer.sha256,
                "vocab_size": tokenizer.vocab_size,
                "eod_id": tokenizer.eod_id,
            }
        )
    return stats


def count_text_bytes(indexed: IndexedDataset, tokenizer: Tokenizer) -> int:
    """Count the UTF-8 bytes of the text that a data set was made of.

    `build_corpus` records them. For a data set of another tool its documents are decoded, which is
    exact for byte-level tokenizers and near for others: spaces and what a normaliser changed
    aren't in the tokens.
    """
    recorded = (indexed.metadata() or {}).get("bytes")
    if isinstance(recorded, int) and recorded > 0:
        return recorded
    documents = (indexed.document(number) for number in range(indexed.num_documents))
    return sum(len(tokenizer.decode(ids, skip_special=True).encode()) for ids in documents)


def _no_text(name: str, count: int, first: Document | None) -> DataError:
    """The error of a corpus without text; it names the corpus, as `name` may be a scratch file."""
    reason = "no document was given"
    if first is not None:
        place = first.path if first.line is None else f"{first.path}:{first.line}"
        reason = f"none of {count} documents gives any, the first is {place}"
        if count == 1:
            reason = f"{place} gives none"
    return DataError(
        f"there is no text for {name!r}: {reason}; use a corpus with more text, or if this is a "
        "part held out of one, hold out another share of it (data.validation_fraction in a run's "
        "YAML file)"
    )


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in batches that keep all cores busy and memory bounded."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
