"""Rows of conversations, of which the assistant's turns are learnt."""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import ClassVar, Literal, TypeAlias, get_args

import numpy as np
from mt_files import RowField
from mt_tokenizer import ChatTemplate, Rendered, Tokenizer
from numpy.typing import NDArray

from mt_data.datasets.gpt import PADDING
from mt_data.datasets.identity import digest_of
from mt_data.datasets.packing import PackedOrder
from mt_data.datasets.row_dataset import RowDataset
from mt_data.documents.chat import ChatReader, TooLong
from mt_data.documents.conversations import read_lines
from mt_data.error import DataError, at_least

ChatPacking: TypeAlias = Literal["best-fit", "none"]


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


class RenderedRows(RowDataset):
    """Rows of whole conversations that are tokens already, with the weights of their labels.

    With `packing="best-fit"` the conversations of an epoch are shuffled and taken in windows, whose
    conversations fill rows by best fit: attention, positions and labels stay within each. The rows
    of a window follow from seed, epoch and window alone. With `"none"` a row is one conversation.

    Args:
        conversations: Tokens of each conversation, 2 to `sequence_length` + 1, with the weight of
            the loss of each token.
        sequence_length: Number of tokens of a row.
        packing: How conversations share rows.
        seed: Seed of the order.
        identity: Everything else that decides the rows, as JSON values.

    Attributes:
        window: Number of conversations that are packed together.
        is_weighted: Whether the rows have `label_weights`.

    Raises:
        DataError: There is no conversation, or an argument is wrong.
    """

    window: ClassVar[int] = 4096

    def __init__(
        self,
        conversations: Iterable[Rendered],
        *,
        sequence_length: int,
        packing: ChatPacking,
        seed: int,
        identity: Mapping[str, object],
    ) -> None:
        at_least(1, sequence_length=sequence_length)
        if packing not in get_args(ChatPacking):
            raise DataError(f"packing is {packing!r}; choose 'best-fit' or 'none'")
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
        size = sequence_length if packing == "best-fit" else None
        how = {"window": self.window, "seed": operator.index(seed)}
        self._identity = {
            **identity,
            "sequence_length": sequence_length,
            "packing": packing,
            **how,
        }
        lengths = np.diff(self._ends, prepend=0) - 1
        self._order = PackedOrder(lengths, size, **how, name="conversations")

    @property
    def fields(self) -> tuple[RowField, ...]:
        """The arrays of a row."""
        return chat_fields(packed=self.packing == "documents", weighted=self.is_weighted)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in an epoch."""
        return len(self._ids)

    @property
    def fingerprint(self) -> str:
        """Digest of the data and of everything that decides rows and their order."""
        return digest_of(self._identity)

    def __len__(self) -> int:
        """Return the number of rows of the first epoch; another may have a few more or less."""
        return len(self._order)

    def row(self, index: int) -> Mapping[str, NDArray]:
        """Return row `index` in the endless stream of epochs."""
        row, at = self.empty(), 0
        for number, talk in enumerate(self.conversations(index)):
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

    def conversations(self, index: int) -> list[int]:
        """Return the numbers of the conversations of row `index`, in the order of the files."""
        return self._order.items(index)

    def _place(self, talk: int) -> tuple[int, int]:
        return (int(self._ends[talk - 1]) if talk else 0), int(self._ends[talk])


class ChatDataset(RenderedRows):
    """Rows of whole conversations, of which the assistant's turns are learnt.

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
        packing: How conversations share rows.
        too_long: Whether a conversation that is longer than a row is refused with its line,
            dropped, or cut.
        seed: Seed of the order.

    Attributes:
        window: Number of conversations that are packed together.
        report: What the files hold, and what was left out.
        is_weighted: Whether the rows have `label_weights`.

    Raises:
        DataError: A line is no conversation or is refused, or there is nothing to learn.

    Shape:
        - `row(i)`: `tokens`, `labels` [sequence_length], -100 for what is not learnt; packed rows
          also have `documents`, the number of each token's conversation, -100 behind the last, and
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
        packing: ChatPacking = "best-fit",
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
        for each in sources:
            yield from reader.read(self._digested(each))
        if not reader.report.conversations:
            raise DataError(f"{', '.join(map(str, sources))}: has nothing to learn; {self._left()}")

    def _digested(self, source: str | os.PathLike[str]) -> Iterable[tuple[str, bytes]]:
        for where, line in read_lines(source):
            self._data.update(line + b"\n")
            yield where, line

    def _left(self) -> str:
        report = self.report
        return f"{report.too_long} are too long, and {report.unlabelled} have no answer to learn"
