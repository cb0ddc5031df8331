"""Rows for an encoder and a decoder: spans of a text are cut out, and to be written (T5)."""

from __future__ import annotations

import hashlib
import json
import operator
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from mt_data.datasets.batch import Packing, Rows
from mt_data.datasets.gpt import PADDING, GPTDataset, TokenSource
from mt_data.datasets.windows import InOrder
from mt_data.error import DataError, at_least

_MOST_DENSITY = 0.5
_LEAST = 2  # tokens of a text: one that stays and one that is cut out


@dataclass(frozen=True, kw_only=True)
class SpanCorruption:
    """How much of a text is cut out, and in how long pieces (Raffel et al., 2020, section 3.3.4).

    Attributes:
        density: Share of the tokens that are cut out.
        mean_length: Of the spans.
    """

    density: float = 0.15
    mean_length: float = 3.0

    def __post_init__(self) -> None:
        if not 0 < self.density <= _MOST_DENSITY:
            raise DataError(f"density is {self.density}; it must lie above 0 and be at most 0.5")
        if not 1 <= self.mean_length <= 1 << 20:
            raise DataError(f"mean_length is {self.mean_length}; it must be 1 or more")

    def counts(self, length: int) -> tuple[int, int]:
        """Tokens that are cut out of a text of two or more, and spans: of a length all the same."""
        noise = min(max(round(length * self.density), 1), length - 1)
        spans = max(round(noise / self.mean_length), 1)
        return noise, min(spans, noise, length - noise)

    def sizes(self, length: int) -> tuple[int, int]:
        """Tokens of the encoder and of the decoder that a text becomes, ends among them.

        Neither gets less with a longer text.
        """
        noise, spans = self.counts(length)
        return length - noise + spans + 1, noise + spans + 1

    def decoder_length(self, inputs: int) -> int:
        """The least multiple of 8 that holds what goes with so many tokens of the encoder."""
        _, written = self.sizes(self.text_length(inputs))
        return -(-written // 8) * 8

    def text_length(self, inputs: int) -> int:
        """Tokens of the longest text that becomes so many of the encoder, with the text's end.

        Raises:
            DataError: No text does.
        """
        lengths = range(_LEAST, max(2 * inputs, _LEAST) + 2)
        after = bisect_right(lengths, inputs, key=lambda length: self.sizes(length)[0])
        near = [self.sizes(length)[0] for length in lengths[max(after - 1, 0) : after + 1]]
        if near[0] != inputs:
            others = " or ".join(map(str, near))
            raise DataError(f"no text becomes {inputs} tokens of the encoder; use {others}")
        return lengths[after - 1]


@dataclass(frozen=True, kw_only=True)
class SpanVocabulary:
    """What rows are made of beside text.

    Attributes:
        sentinel: Id that stands for the first span; the next ones are one lower each.
        eod: Id of the end of a text, which ends both sequences.
        start: Id that the decoder's sequence begins with, and is filled up with.
    """

    sentinel: int
    eod: int
    start: int = 0


class SpanDataset(InOrder):
    """Texts with a sentinel in the place of each span, and the spans behind their sentinels.

    With a text `a b c d e f`, of which `b c` and `e` are cut out, the encoder reads
    `a <0> d <1> f end` and the decoder is to write `<0> b c <1> e end`. Texts are those of a
    `GPTDataset`, as long as to fill the encoder's sequence; how many tokens and spans are cut out
    follows from that length, and which ones from seed and index alone: lengths are those of a
    random composition, and a text begins with what stays (as in the T5 of Raffel et al.).

    With `packing="documents"` a text is cut where its documents end, and each part of two tokens or
    more becomes a pair of its own, with an end and sentinels from the first one on. A row holds
    these pairs one after the other. Their ends and roundings take places, so the last parts of a
    text are cut off as far as they do not fit the encoder's sequence or the decoder's: of documents
    far shorter than a row more than of others, and less with a larger `decoder_length`.

    Args:
        indexed: Where tokens come from; texts run across the ends of its documents.
        sequence_length: Tokens of the encoder.
        vocabulary: Sentinels and other tokens that are no text.
        corruption: What is cut out.
        decoder_length: Tokens of the decoder; by default the least multiple of 8 that holds those
            of one text.
        packing: Whether the documents of a text are pairs of their own.
        seed: Of the order and of all that is drawn.

    Raises:
        DataError: A length does not do, there are too few sentinels, or tokens for one text.

    Shape:
        - `row(i)`: `encoder_tokens` [sequence_length]; `tokens`, which are the labels behind
          `start`, and `labels` [decoder_length], -100 behind the end; int64. Packed ones also have
          `encoder_documents` and `documents`, the number of each token's pair, `PADDING` behind the
          last, and `encoder_positions` and `positions`, its place there
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
                f"each behind its sentinel, and the end of the text are {least}; use that or more"
            )
        if vocabulary.sentinel - spans + 1 < 0:
            raise DataError(
                f"{spans} spans need as many sentinels, and the first one is "
                f"{vocabulary.sentinel}; use a shorter sequence_length"
            )
        lengths = range(_LEAST, self.text_length + 1)
        self._sizes = np.array([self.corruption.sizes(length) for length in lengths], np.int64)
        self._texts = GPTDataset(indexed, sequence_length=self.text_length, seed=self.seed)

    @property
    def samples_per_epoch(self) -> int:
        """Rows before data repeats; then other spans are cut out of them."""
        return self._texts.samples_per_epoch

    def __len__(self) -> int:
        return self.samples_per_epoch

    @property
    def fingerprint(self) -> str:
        """Digest of the data and of everything that decides rows and their order, but packing.

        A number is that of the same text with every packing, so a run that changes it goes on
        where it was.
        """
        identity = {
            "data": self._texts.fingerprint,
            "rows": "spans",
            "decoder_length": self.decoder_length,
            **asdict(self.corruption),
            **asdict(self.vocabulary),
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def row(self, index: int) -> Mapping[str, NDArray]:
        """Return row `index` of the endless stream of epochs."""
        index = operator.index(index)
        text = self._texts.sample(index, 0, self.text_length)
        row = dict(self.empty())
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

    def empty(self) -> Mapping[str, NDArray]:
        """Return a row without labels."""
        fill, read, written = self.vocabulary.start, self.sequence_length, self.decoder_length
        row = {
            "encoder_tokens": np.full(read, fill, np.int64),
            "tokens": np.full(written, fill, np.int64),
            "labels": np.full(written, PADDING, np.int64),
        }
        if self.packing == "documents":
            for side, length in (("encoder_", read), ("", written)):
                row[f"{side}documents"] = np.full(length, PADDING, np.int64)
                row[f"{side}positions"] = np.zeros(length, np.int64)
        return row

    def _parts(
        self, text: NDArray[np.int64], documents: NDArray[np.int64]
    ) -> Iterator[NDArray[np.int64]]:
        """The documents of a text, without their own ends, that are long enough to be pairs."""
        for part in np.split(text, np.flatnonzero(np.diff(documents)) + 1):
            part = part[:-1] if part[-1] == self.vocabulary.eod else part
            if len(part) >= _LEAST:
                yield part

    def _pair(
        self, text: NDArray[np.int64], *number: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """What the encoder reads of a text, and what the decoder is to write."""
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
        """Lay a pair out in a row, from a place of the encoder and one of the decoder on."""
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
        """Lengths of the spans, 1 or more each, that add up to a total; each way is as likely."""
        index, *pair = number
        text = repr((self.seed, index, "spans", what, *pair)).encode()
        key = int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "big")
        drawn = np.random.Philox(key=key).random_raw(total - 1)
        cuts = np.sort(np.argsort(drawn, kind="stable")[: spans - 1]) + 1
        return np.diff(cuts, prepend=0, append=total)
