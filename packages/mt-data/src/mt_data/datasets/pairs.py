"""Rows of pairs: an encoder reads the prompt, and a decoder writes the completion (T5)."""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from mt_files import RowField
from mt_tokenizer import Tokenizer, TokenizerError
from numpy.typing import NDArray

from mt_data.datasets.packed_rows import PackedRows, RowPacking
from mt_data.datasets.spans import span_fields
from mt_data.documents.chat import TooLong
from mt_data.documents.conversations import digested_lines, parse_conversation
from mt_data.error import DataError, DataFileError, at_least, one_of

_Tokens: TypeAlias = NDArray[np.int32]


class PairDataset(PackedRows):
    """Rows of prompts for an encoder and of completions for a decoder.

    A line of JSON has the texts `prompt` and `completion`; the end-of-document token ends each. All
    pairs are tokenized once and kept in memory, 4 bytes a token. No token sees the padding of a
    row.

    With `packing="best-fit"` a row has several pairs, and attention stays within each; the size of
    a pair is the larger of its shares of both lengths. With `"none"` a row is one pair.

    Args:
        source: A file of pairs (JSON lines, JSON, parquet, Arrow), a folder of them, or several.
        tokenizer: The tokenizer.
        lengths: Number of tokens of the encoder's and of the decoder's sequence.
        start: Id at the start of the decoder's sequence, also used as padding.
        packing: Packing of pairs into rows.
        too_long: Treatment of a pair with a text longer than a row: `refuse` with the line, `drop`,
            or `cut` both texts.
        seed: Seed of the order.

    Attributes:
        num_dropped: Number of dropped pairs.
        num_cut: Number of cut pairs.

    Raises:
        DataError: A line is no pair or is refused, or there is no pair.

    Shape:
        - `row(i)`: `encoder_tokens` [lengths[0]]; `tokens`, which are the labels shifted by
           `start`, and `labels` [lengths[1]], -100 after the last pair; `encoder_documents` and
           `documents`, the number of each token's pair, -100 after the last; `encoder_positions`
           and `positions`, its place in the pair; int64
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        tokenizer: Tokenizer,
        *,
        lengths: tuple[int, int],
        start: int = 0,
        packing: RowPacking = "best-fit",
        too_long: TooLong = "refuse",
        seed: int = 0,
    ) -> None:
        self.sequence_length, self.decoder_length = lengths
        at_least(2, sequence_length=self.sequence_length, decoder_length=self.decoder_length)
        one_of(RowPacking, packing=packing)
        one_of(TooLong, too_long=too_long)
        self.packing, self.start = "documents", operator.index(start)
        self.num_dropped = self.num_cut = 0
        self._tokenizer, self._too_long = tokenizer, too_long
        sources = [source] if isinstance(source, str | os.PathLike) else list(source)
        data = hashlib.sha256()
        self._pairs: list[tuple[_Tokens, _Tokens]] = []
        for where, line in digested_lines(sources, data):
            if (pair := self._read(where, line)) is not None:
                self._pairs.append(pair)
        if not self._pairs:
            left = f"{self.num_dropped} are too long"
            raise DataError(f"{', '.join(map(str, sources))}: has no pairs to learn; {left}")
        self._pack(
            [*map(self._length, self._pairs)],
            self._room,
            packing=packing,
            seed=seed,
            name="pairs",
            identity={
                "rows": "pairs",
                "name": "pairs",
                "data": data.hexdigest(),
                "tokenizer": tokenizer.sha256,
                "sizes": list(lengths),
                "start": self.start,
                "too_long": too_long,
            },
        )

    def _read(self, where: str, line: bytes) -> tuple[_Tokens, _Tokens] | None:
        """Return the tokens of a line; None for a dropped pair."""
        talk = parse_conversation(where, line)
        if talk.messages:
            text = "has messages; an encoder and a decoder learn a prompt and a completion as texts"
            raise DataFileError(where, text)
        try:
            texts = self._tokenizer.encode_batch([talk.prompt, talk.completion])
        except TokenizerError as error:
            raise DataFileError(where, str(error)) from None
        sizes = self.sequence_length, self.decoder_length
        source, target = (np.array([*own, self._tokenizer.eod_id], np.int32) for own in texts)
        if len(source) > sizes[0] or len(target) > sizes[1]:
            if self._too_long == "refuse":
                raise DataFileError(
                    where,
                    f"has {len(source)} tokens for the encoder and {len(target)} for the decoder, "
                    f"and a row takes {sizes[0]} and {sizes[1]}; use longer rows, or leave such "
                    "pairs out or cut them (too_long: drop or cut)",
                )
            if self._too_long == "drop":
                self.num_dropped += 1
                return None
            self.num_cut += 1
        return source[: sizes[0]], target[: sizes[1]]

    @property
    def _room(self) -> int:
        return max(self.sequence_length, self.decoder_length)

    def _length(self, pair: tuple[_Tokens, _Tokens]) -> int:
        """Return the larger of a pair's two shares, as a part of the room, rounded up."""
        sizes = self.sequence_length, self.decoder_length
        return max(-(-len(x) * self._room // size) for x, size in zip(pair, sizes, strict=True))

    @property
    def fields(self) -> tuple[RowField, ...]:
        """The arrays of a row."""
        return span_fields(packed=True, start=self.start)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Length of the encoder's and of the decoder's sequence."""
        return {"encoder": self.sequence_length, "tokens": self.decoder_length}

    @property
    def num_tokens(self) -> int:
        """Number of tokens in an epoch."""
        return sum(len(source) + len(target) for source, target in self._pairs)

    def row(self, index: int) -> Mapping[str, NDArray]:
        """Return row `index` in the endless stream of epochs."""
        row, read, written = self.empty(), 0, 0
        for number, item in enumerate(self.items(index)):
            source, target = self._pairs[item]
            asked = slice(read, read + len(source))
            answer = slice(written, written + len(target))
            row["encoder_tokens"][asked], row["labels"][answer] = source, target
            row["tokens"][answer] = [self.start, *target[:-1]]
            for prefix, here in (("encoder_", asked), ("", answer)):
                row[f"{prefix}documents"][here] = number
                row[f"{prefix}positions"][here] = np.arange(here.stop - here.start)
            read, written = asked.stop, answer.stop
        return row
