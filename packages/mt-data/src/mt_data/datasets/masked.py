"""Rows for masked language modelling, alone or with pairs of texts."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from mt_files import RowField
from mt_tokenizer import Tokenizer
from numpy.typing import NDArray

from mt_data.datasets.gpt import PADDING, TokenSource
from mt_data.datasets.identity import digest_of, random_bits
from mt_data.datasets.masking import Masking
from mt_data.datasets.permutation import Permutation
from mt_data.datasets.row_dataset import RowDataset
from mt_data.datasets.special_ids import special_ids
from mt_data.error import DataError, at_least

_NAMES = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "pad": "[PAD]"}


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskedVocabulary:
    """The special tokens of masked language modelling, and the ordinary ones.

    Attributes:
        cls: Id of the token at the beginning of a row.
        sep: Id of the token after each text.
        mask: Id of the token that replaces a token to predict.
        pad: Id of the padding token.
        ordinary: Ids of ordinary tokens; other tokens are never predicted or used as replacement.
        starts: Whether each id begins a word, for whole words.

    Shape:
        - ordinary: [N] int64; starts: [vocab_size] bool
    """

    cls: int
    sep: int
    mask: int
    pad: int
    ordinary: NDArray[np.int64]
    starts: NDArray[np.bool_]

    @classmethod
    def of(cls, tokenizer: Tokenizer, names: Mapping[str, str] | None = None) -> MaskedVocabulary:
        """Find the special tokens of a tokenizer.

        Args:
            tokenizer: A tokenizer with these tokens.
            names: Names of `cls`, `sep`, `mask` and `pad` that differ from `[CLS]` and so on.

        Raises:
            DataError: The tokenizer lacks a special token, or two special tokens are the same.
        """
        ids = special_ids(tokenizer, {**_NAMES, **(names or {})})
        special = np.array(sorted(tokenizer.special_tokens.values()), np.int64)
        ordinary = np.setdiff1d(np.arange(tokenizer.vocab_size), special)
        return MaskedVocabulary(**ids, ordinary=ordinary, starts=tokenizer.word_starts)


@cache  # each row asks for them
def masked_fields(*, pairs: bool, pad: int = 0) -> tuple[RowField, ...]:
    """Return the arrays of a row with masked tokens.

    Args:
        pairs: Whether rows have two texts.
        pad: Id of the padding token.
    """
    fields = (
        RowField(name="tokens", fill=pad, stages=("first", "last"), is_tokens=True),
        RowField(name="labels", fill=PADDING, is_tokens=True, counts="tokens"),
        RowField(name="mask", dtype="bool", cut="whole"),
    )
    of_pairs = (
        RowField(name="token_types", stages=("first",)),
        RowField(name="sequence_labels", dims=(), fill=PADDING, cut="once", counts="sequences"),
    )
    return (*fields, *of_pairs) if pairs else fields


class MaskedDataset(RowDataset):
    """Rows `[CLS] text [SEP]`, or `[CLS] a [SEP] b [SEP]`, with some tokens masked.

    Each document is cut into texts that fill a row, and every text occurs once in an epoch, in the
    order of a keyed permutation. In a pair, b is either the continuation of a (class 0) or, with
    probability one half, the beginning of a text of another document, of the same length (class 1;
    Devlin et al., 2019). All random choices depend only on seed and index.

    Args:
        indexed: The source of tokens; each of its sequences is a document.
        sequence_length: Number of tokens of a row; shorter texts are padded.
        vocabulary: Special and ordinary tokens.
        masking: Choice and replacement of the tokens to predict.
        pairs: Whether rows have two texts, token types and a class.
        seed: Seed of the order and of all random choices.

    Raises:
        DataError: There is no text, or pairs are requested from a single document.

    Shape:
        - `row(i)`: `tokens` and `labels`, -100 except for the tokens to predict:
          [sequence_length] int64; `mask`: [sequence_length] bool, False at padding; with pairs
          `token_types`, 1 for b and the [SEP] after it: [sequence_length], and `sequence_labels`:
          [], both int64
    """

    def __init__(
        self,
        indexed: TokenSource,
        *,
        sequence_length: int,
        vocabulary: MaskedVocabulary,
        masking: Masking | None = None,
        pairs: bool = False,
        seed: int = 0,
    ) -> None:
        at_least(1, sequence_length=sequence_length)
        self.indexed, self.sequence_length, self.pairs = indexed, sequence_length, pairs
        self.vocabulary, self.masking = vocabulary, masking or Masking()
        self.seed = operator.index(seed)
        self._least = 2 if pairs else 1
        self._room = sequence_length - (3 if pairs else 2)
        if self._room < self._least:
            raise DataError(
                f"sequence_length {sequence_length} leaves no room for text beside "
                f"{3 if pairs else 2} special tokens; use {self._least + 3 - (not pairs)} or more"
            )
        lengths = np.asarray(indexed.lengths, np.int64)
        texts = np.where(lengths < self._least, 0, (lengths - self._least) // self._room + 1)
        self._ends = np.cumsum(texts)
        if not len(texts) or not self._ends[-1]:
            raise DataError("there is no text to make rows from")
        if pairs and np.count_nonzero(texts) < 2:
            raise DataError("pairs need at least two documents, and there is one; build with more")

    @property
    def fields(self) -> tuple[RowField, ...]:
        """The arrays of a row."""
        return masked_fields(pairs=self.pairs, pad=self.vocabulary.pad)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the data."""
        return int(self.indexed.lengths.sum())

    @property
    def samples_per_epoch(self) -> int:
        """Number of texts, each of which is one row in an epoch."""
        return int(self._ends[-1])

    def __len__(self) -> int:
        return self.samples_per_epoch

    @property
    def fingerprint(self) -> str:
        """Digest of the data and of everything that decides rows and their order."""
        vocabulary = self.vocabulary
        identity = {
            "data": self.indexed.fingerprint,
            "rows": "masked",
            "sequence_length": self.sequence_length,
            "seed": self.seed,
            "pairs": self.pairs,
            "special": [vocabulary.cls, vocabulary.sep, vocabulary.mask, vocabulary.pad],
            **self.masking.identity(),
        }
        return digest_of(identity)

    def row(self, index: int) -> Mapping[str, NDArray]:
        """Return row `index` in the endless stream of epochs."""
        index = operator.index(index)
        if index < 0:
            raise IndexError(f"row {index} does not exist; an index is 0 or more")
        epoch, place = divmod(index, self.samples_per_epoch)
        number = Permutation(self.samples_per_epoch, self.seed, "masked rows", epoch)(place)
        text = self._text(number)
        if not self.pairs:
            return self._hidden(index, [text])
        cut, other, apart = self._draw(index, "pairs", 3)
        first = 1 + int(cut * (len(text) - 1))
        second = text[first:]
        if apart >= 0.5:
            second = self._text(self._elsewhere(number, other))[: len(second)]
        row = self._hidden(index, [text[:first], second])
        return {**row, "sequence_labels": np.array(apart >= 0.5, np.int64)}

    def _draw(self, index: int, what: str, count: int) -> NDArray[np.float64]:
        """Return numbers in [0, 1) that depend only on seed, index and purpose."""
        bits = random_bits(count, self.seed, index, what) >> np.uint64(11)
        return bits.astype(np.float64) * 2.0**-53

    def _text(self, number: int) -> NDArray[np.int64]:
        document, place = self._find(number)
        start = place * self._room
        count = min(self._room, int(self.indexed.lengths[document]) - start)
        return np.asarray(self.indexed.read(document, start, count), np.int64)

    def _find(self, number: int) -> tuple[int, int]:
        """Return the document of a text, and the text's number in that document."""
        document = int(np.searchsorted(self._ends, number, side="right"))
        return document, number - self._before(document)

    def _before(self, document: int) -> int:
        """Return the number of texts of all earlier documents."""
        return int(self._ends[document - 1]) if document else 0

    def _elsewhere(self, number: int, drawn: float) -> int:
        """Return a random text from any other document."""
        document, _ = self._find(number)
        first, end = self._before(document), int(self._ends[document])
        other = int(drawn * (self.samples_per_epoch - (end - first)))
        return other if other < first else other + end - first

    def _hidden(self, index: int, texts: list[NDArray[np.int64]]) -> dict[str, NDArray]:
        """Lay out texts in a row, and mask some of its tokens."""
        vocabulary, row = self.vocabulary, self.empty()
        tokens, at = row["tokens"], 1
        tokens[0] = vocabulary.cls
        for kind, text in enumerate(texts):
            end = at + len(text)
            tokens[at:end], tokens[end] = text, vocabulary.sep
            if self.pairs:
                row["token_types"][at : end + 1] = kind
            at = end + 1
        row["mask"][:at] = True
        places = np.flatnonzero(np.isin(tokens, vocabulary.ordinary))
        chosen, firsts = self.masking.choose(
            places,
            vocabulary.starts[tokens[places]],
            lambda what: self._draw(index, what, len(tokens))[places],
        )
        row["labels"][chosen] = tokens[chosen]
        how, which = self._draw(index, "replacements", 2 * len(tokens)).reshape(2, -1)
        how, which = how[firsts], which[chosen]
        some = vocabulary.ordinary[(which * len(vocabulary.ordinary)).astype(np.int64)]
        share = self.masking.masked
        stays = np.where(how < share + self.masking.random, some, tokens[chosen])
        tokens[chosen] = np.where(how < share, vocabulary.mask, stays)
        return row
