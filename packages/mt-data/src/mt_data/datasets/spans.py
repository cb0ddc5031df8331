"""Rows for an encoder and a decoder: the decoder predicts the spans cut out of a text (T5)."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np
from mt_files import RowField, Stage
from numpy.typing import NDArray

from mt_data.datasets.batch import Packing, Rows
from mt_data.datasets.gpt import PADDING, GPTDataset, TokenSource
from mt_data.datasets.identity import digest_of, random_bits
from mt_data.datasets.row_dataset import RowDataset
from mt_data.error import DataError, at_least

_MOST_DENSITY = 0.5
_LEAST = 2  # tokens of a text: one stays and one is cut out


@dataclass(frozen=True, kw_only=True)
class SpanCorruption:
    """The amount and the length of the spans to cut out (Raffel et al., 2020, section 3.3.4).

    Attributes:
        density: Share of the tokens to cut out.
        mean_length: Mean length of the spans.
    """

    density: float = 0.15
    mean_length: float = 3.0

    def __post_init__(self) -> None:
        if not 0 < self.density <= _MOST_DENSITY:
            raise DataError(f"density is {self.density}; it must lie above 0 and be at most 0.5")
        if not 1 <= self.mean_length <= 1 << 20:
            raise DataError(f"mean_length is {self.mean_length}; it must be 1 or more")

    def counts(self, length: int) -> tuple[int, int]:
        """Return the numbers of tokens and spans to cut out of a text of two or more tokens."""
        noise = min(max(round(length * self.density), 1), length - 1)
        spans = max(round(noise / self.mean_length), 1)
        return noise, min(spans, noise, length - noise)

    def sizes(self, length: int) -> tuple[int, int]:
        """Return the encoder and decoder lengths of a text, including ends.

        Both grow with the length of the text, or stay the same.
        """
        noise, spans = self.counts(length)
        return length - noise + spans + 1, noise + spans + 1

    def decoder_length(self, inputs: int) -> int:
        """Return the decoder length for an encoder length, rounded up to a multiple of 8."""
        _, written = self.sizes(self.text_length(inputs))
        return -(-written // 8) * 8

    def text_length(self, inputs: int) -> int:
        """Return the length of the longest text for an encoder length that includes the end.

        Raises:
            DataError: No text has this encoder length.
        """
        lengths = range(_LEAST, max(2 * inputs, _LEAST) + 2)
        after = bisect_right(lengths, inputs, key=lambda length: self.sizes(length)[0])
        near = [self.sizes(length)[0] for length in lengths[max(after - 1, 0) : after + 1]]
        if near[0] != inputs:
            others = " or ".join(map(str, near))
            raise DataError(f"no text fills exactly {inputs} tokens of the encoder; use {others}")
        return lengths[after - 1]


@dataclass(frozen=True, kw_only=True)
class SpanVocabulary:
    """The special tokens of span corruption.

    Attributes:
        sentinel: Id of the first span's sentinel; the following spans count downwards.
        eod: Id of the end of a text, which ends both sequences.
        start: Id at the start of the decoder's sequence, also used as padding.
    """

    sentinel: int
    eod: int
    start: int = 0


@cache  # each row asks for them
def span_fields(*, packed: bool, start: int = 0) -> tuple[RowField, ...]:
    """Return the arrays of a row for an encoder and a decoder.

    Args:
        packed: Whether a row has several pairs.
        start: Id at the start of the decoder's sequence, also used as padding.
    """
    ends: tuple[Stage, ...] = ("first", "last")
    encoder = ("encoder",)
    labels = RowField(
        name="labels",
        fill=PADDING,
        is_tokens=True,
        counts="tokens",
        positions="positions" if packed else None,
    )
    fields = (
        RowField(name="encoder_tokens", dims=encoder, fill=start, stages=ends, is_tokens=True),
        RowField(name="tokens", fill=start, stages=ends, is_tokens=True),
        labels,
    )
    of_pairs = (
        RowField(name="encoder_documents", dims=encoder, fill=PADDING, cut="whole"),
        RowField(name="encoder_positions", dims=encoder),
        RowField(name="documents", fill=PADDING, cut="whole"),
        RowField(name="positions"),
    )
    return (*fields, *of_pairs) if packed else fields


class SpanDataset(RowDataset):
    """Texts with a sentinel in place of each span, and the spans after their sentinels.

    If `b c` and `e` are cut out of the text `a b c d e f`, the encoder reads `a <0> d <1> f end`
    and the decoder predicts `<0> b c <1> e end`. Texts come from a `GPTDataset` and are long enough
    to fill the encoder's sequence. The number of tokens and spans to cut out follows from that
    length; their choice depends only on seed and index. Span lengths are a random composition, and
    a text begins with a part that stays (as in the T5 of Raffel et al.).

    With `packing="documents"` a text is cut at the ends of its documents, and each part of two
    tokens or more becomes a separate pair, with its own end and sentinels. A row contains these
    pairs one after the other. Because ends and rounding take space, the last parts of a text are
    cut off if they do not fit the encoder's or the decoder's sequence. This affects documents much
    shorter than a row the most, and is reduced by a larger `decoder_length`.

    Args:
        indexed: The source of tokens; texts run across the ends of its documents.
        sequence_length: Number of tokens of the encoder.
        vocabulary: Sentinels and other special tokens.
        corruption: Amount and length of the spans.
        decoder_length: Number of tokens of the decoder; by default the smallest multiple of 8 that
            fits one text.
        packing: Whether the documents of a text are separate pairs.
        seed: Seed of the order and of all random choices.

    Raises:
        DataError: A length is impossible, or there are too few sentinels, or too few tokens for one
            text.

    Shape:
        - `row(i)`: `encoder_tokens` [sequence_length]; `tokens`, which are the labels shifted by
          `start`, and `labels` [decoder_length], -100 after the end; int64. Packed rows also have
          `encoder_documents` and `documents`, the number of each token's pair (`PADDING` after the
          last pair), and `encoder_positions` and `positions`, its position in the pair
    """

    def __init__(
        self,
        indexed: TokenSource,
        *,
        sequence_length: int,
        vocabulary: SpanVocabulary,
        corruption: SpanCorruption | None = None,
        decoder_length: int | None = None,
        packing: Packing = "none",
        seed: int = 0,
    ) -> None:
        at_least(3, sequence_length=sequence_length)
        self.indexed, self.sequence_length = indexed, sequence_length
        self.vocabulary, self.corruption = vocabulary, corruption or SpanCorruption()
        self.packing, self.seed = Rows(packing=packing).packing, operator.index(seed)
        self.text_length = self.corruption.text_length(sequence_length)
        noise, spans = self.corruption.counts(self.text_length)
        _, least = self.corruption.sizes(self.text_length)
        usual = self.corruption.decoder_length(sequence_length)
        self.decoder_length = usual if decoder_length is None else decoder_length
        if self.decoder_length < least:
            raise DataError(
                f"decoder_length is {self.decoder_length}, but {spans} spans of {noise} tokens, "
                f"with their sentinels and the end of the text, take {least}; use that or more"
            )
        if vocabulary.sentinel - spans + 1 < 0:
            raise DataError(
                f"{spans} spans need {spans} sentinels, and the first one is "
                f"{vocabulary.sentinel}; use a shorter sequence_length"
            )
        lengths = range(_LEAST, self.text_length + 1)
        self._sizes = np.array([self.corruption.sizes(length) for length in lengths], np.int64)
        self._texts = GPTDataset(indexed, sequence_length=self.text_length, seed=self.seed)

    @property
    def fields(self) -> tuple[RowField, ...]:
        """The arrays of a row."""
        return span_fields(packed=self.packing == "documents", start=self.vocabulary.start)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Length of the encoder's and of the decoder's sequence."""
        return {"encoder": self.sequence_length, "tokens": self.decoder_length}

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the data."""
        return int(self.indexed.lengths.sum())

    @property
    def samples_per_epoch(self) -> int:
        """Number of rows before data repeats; then different spans are cut out."""
        return self._texts.samples_per_epoch

    def __len__(self) -> int:
        return self.samples_per_epoch

    @property
    def fingerprint(self) -> str:
        """Digest of the data and of everything that decides rows and their order, except packing.

        A row number means the same text with every packing, so a run that changes it continues at
        the same place.
        """
        identity = {
            "data": self._texts.fingerprint,
            "rows": "spans",
            "decoder_length": self.decoder_length,
            **asdict(self.corruption),
            **asdict(self.vocabulary),
        }
        return digest_of(identity)

    def row(self, index: int) -> Mapping[str, NDArray]:
        """Return row `index` in the endless stream of epochs."""
        index = operator.index(index)
        text = self._texts.sample(index, 0, self.text_length)
        row = self.empty()
        if self.packing == "none":
            self._put(row, self._pair(text, index), 0, (0, 0))
            return row
        read = written = number = 0
        for part in self._parts(text, self._texts.sample_documents(index)[:-1]):
            room = self.sequence_length - read, self.decoder_length - written
            length = min(len(part), _LEAST - 1 + int((self._sizes <= room).all(1).sum()))
            if length < _LEAST:
                break
            pair = self._pair(part[:length], index, number)
            self._put(row, pair, number, (read, written))
            read, written, number = read + len(pair[0]), written + len(pair[1]), number + 1
        return row

    def _parts(
        self, text: NDArray[np.int64], documents: NDArray[np.int64]
    ) -> Iterator[NDArray[np.int64]]:
        """Yield the sufficiently long documents of a text, without their end tokens."""
        for part in np.split(text, np.flatnonzero(np.diff(documents)) + 1):
            part = part[:-1] if part[-1] == self.vocabulary.eod else part
            if len(part) >= _LEAST:
                yield part

    def _pair(
        self, text: NDArray[np.int64], *number: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the encoder's input and the decoder's target for a text."""
        noise, spans = self.corruption.counts(len(text))
        kept = self._lengths(number, "kept", len(text) - noise, spans)
        cut = self._lengths(number, "cut", noise, spans)
        ends = np.cumsum(np.stack((kept, cut), 1).ravel())[:-1]
        parts = np.split(text, ends)
        encoder, target = [], []
        for place, (stays, goes) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
            sentinel = [self.vocabulary.sentinel - place]
            encoder += [stays, sentinel]
            target += [sentinel, goes]
        end = [self.vocabulary.eod]
        return np.concatenate([*encoder, end]), np.concatenate([*target, end])

    def _put(
        self,
        row: Mapping[str, NDArray],
        pair: tuple[NDArray[np.int64], NDArray[np.int64]],
        number: int,
        starts: tuple[int, int],
    ) -> None:
        """Write a pair into a row, at a start of the encoder and one of the decoder."""
        for side, start, tokens in zip(("encoder_", ""), starts, pair, strict=True):
            own = slice(start, start + len(tokens))
            if side:
                row["encoder_tokens"][own] = tokens
            else:
                row["labels"][own] = tokens
                row["tokens"][start + 1 : own.stop] = tokens[:-1]
            if self.packing == "documents":
                row[f"{side}documents"][own] = number
                row[f"{side}positions"][own] = np.arange(len(tokens))

    def _lengths(
        self, number: tuple[int, ...], what: str, total: int, spans: int
    ) -> NDArray[np.int64]:
        """Return random span lengths of at least 1 that add up to a total, uniformly."""
        index, *pair = number
        drawn = random_bits(total - 1, self.seed, index, "spans", what, *pair)
        cuts = np.sort(np.argsort(drawn, kind="stable")[: spans - 1]) + 1
        return np.diff(cuts, prepend=0, append=total)
