"""Rows of conversations, with labels on the assistant's turns."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

import numpy as np
from mt_files import RowField
from mt_tokenizer import ChatTemplate, Rendered, Tokenizer
from numpy.typing import NDArray

from mt_data.datasets.gpt import PADDING
from mt_data.datasets.packed_rows import PackedRows, RowPacking
from mt_data.documents.chat import ChatReader, TooLong
from mt_data.documents.conversations import digested_lines
from mt_data.error import DataError, at_least, one_of


@cache  # each row asks for them
def chat_fields(*, packed: bool, weighted: bool = False) -> tuple[RowField, ...]:
    """Return the arrays of a row of conversations.

    Args:
        packed: Whether a row has several conversations, which attention keeps apart.
        weighted: Whether labels have weights other than 1.
    """
    positions = "positions" if packed else None
    fields = [
        RowField(name="tokens", stages=("first", "last"), is_tokens=True),
        RowField(name="labels", fill=PADDING, is_tokens=True, counts="tokens", positions=positions),
    ]
    if weighted:
        fields.append(RowField(name="label_weights", dtype="float32", stages=("last",)))
    if packed:
        fields.append(RowField(name="documents", fill=PADDING, cut="whole"))
        fields.append(RowField(name="positions"))
    return tuple(fields)


class RenderedRows(PackedRows):
    """Rows of whole, tokenized conversations, with the weights of their labels.

    Attention, positions and labels of a packed row stay within each conversation.

    Args:
        conversations: Tokens of each conversation, 2 to `sequence_length` + 1, with the weight of
            the loss of each token.
        sequence_length: Number of tokens of a row.
        packing: How conversations share rows.
        seed: Seed of the order.
        identity: Everything else that decides the rows, as JSON values.

    Attributes:
        is_weighted: Whether the rows have `label_weights`.

    Raises:
        DataError: There is no conversation, or an argument is wrong.
    """

    def __init__(
        self,
        conversations: Iterable[Rendered],
        *,
        sequence_length: int,
        packing: RowPacking,
        seed: int,
        identity: Mapping[str, object],
    ) -> None:
        at_least(1, sequence_length=sequence_length)
        one_of(RowPacking, packing=packing)
        self.sequence_length = sequence_length
        self.packing = "documents" if packing == "best-fit" else "none"
        ids: list[NDArray[np.int32]] = []
        weights: list[NDArray[np.float32]] = []
        for found in conversations:
            ids.append(np.array(found.ids, np.int32))
            weights.append(np.array(found.trained, np.float32))
        if not ids:
            raise DataError("there is nothing to learn: give conversations with an answer")
        self._ends = np.cumsum([len(row) for row in ids])
        self._ids, self._weights = np.concatenate(ids), np.concatenate(weights)
        self.is_weighted = bool(np.any((self._weights != 0) & (self._weights != 1)))
        self._pack(
            np.diff(self._ends, prepend=0) - 1,
            sequence_length,
            packing=packing,
            seed=seed,
            name="conversations",
            identity={**identity, "sequence_length": sequence_length},
        )

    @property
    def fields(self) -> tuple[RowField, ...]:
        """The arrays of a row."""
        return chat_fields(packed=self.packing == "documents", weighted=self.is_weighted)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in an epoch."""
        return len(self._ids)

    def row(self, index: int) -> Mapping[str, NDArray]:
        """Return row `index` in the endless stream of epochs."""
        row, at = self.empty(), 0
        for number, talk in enumerate(self.items(index)):
            begin, end = self._place(talk)
            size = end - begin - 1
            here = slice(at, at + size)
            row["tokens"][here] = self._ids[begin : end - 1]
            trained = self._weights[begin + 1 : end]
            row["labels"][here] = np.where(trained > 0, self._ids[begin + 1 : end], PADDING)
            if self.is_weighted:
                row["label_weights"][here] = trained
            if self.packing == "documents":
                row["documents"][here], row["positions"][here] = number, np.arange(size)
            at += size
        return row

    def _place(self, talk: int) -> tuple[int, int]:
        return (int(self._ends[talk - 1]) if talk else 0), int(self._ends[talk])


class ChatDataset(RenderedRows):
    """Rows of whole conversations, with labels on the assistant's turns.

    A line of JSON has `messages` (with `tools`), `prompt` and `completion` (texts or messages), or
    ShareGPT's `conversations`. All are rendered once and kept in memory, 8 bytes a token.

    With `packing="best-fit"` the conversations of an epoch are shuffled and taken in windows, whose
    conversations fill rows by best fit: attention, positions and labels stay within each. The rows
    of a window follow from seed, epoch and window alone. With `"none"` a row is one conversation.

    Args:
        source: A file of conversations (JSON lines, JSON, parquet, Arrow), a folder of them, or
            several.
        tokenizer: The tokenizer.
        template: Chat template with this tokenizer; needed for messages.
        sequence_length: Number of tokens of a row.
        packing: Packing of conversations into rows.
        too_long: Treatment of conversations longer than a row: `refuse` with the line, `drop` or
            `cut`.
        seed: Seed of the order.

    Attributes:
        window: Number of conversations to pack together.
        report: Counts of kept and of left-out conversations.
        is_weighted: Whether the rows have `label_weights`.

    Raises:
        DataError: A line is no conversation or is refused, or there is nothing to learn.

    Shape:
        - `row(i)`: `tokens`, `labels` [sequence_length], -100 without a loss; packed rows also have
           `documents`, the number of each token's conversation, -100 after the last, and
           `positions`, its place in the conversation; int64. `label_weights` [sequence_length]
           float32
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        *,
        sequence_length: int,
        packing: RowPacking = "best-fit",
        too_long: TooLong = "refuse",
        seed: int = 0,
    ) -> None:
        sources = [source] if isinstance(source, str | os.PathLike) else list(source)
        reader = ChatReader(tokenizer, template, size=sequence_length, too_long=too_long)
        self.report, self._data = reader.report, hashlib.sha256()
        super().__init__(
            self._read(reader, sources),
            sequence_length=sequence_length,
            packing=packing,
            seed=seed,
            identity={
                "rows": "chat",
                "tokenizer": tokenizer.sha256,
                "template": None if template is None else [template.source, template.tokens],
                "too_long": too_long,
            },
        )
        self._identity["data"] = self._data.hexdigest()

    def _read(
        self, reader: ChatReader, sources: Sequence[str | os.PathLike[str]]
    ) -> Iterator[Rendered]:
        yield from reader.read(digested_lines(sources, self._data))
        if not reader.report.conversations:
            raise DataError(f"{', '.join(map(str, sources))}: has nothing to learn; {self._left()}")

    def _left(self) -> str:
        report = self.report
        return f"{report.too_long} are too long, and {report.unlabelled} have no answer to learn"
