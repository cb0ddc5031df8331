"""Samples of rearranged text, from which a model learns to fill in the middle."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from mt_tokenizer import Tokenizer
from numpy.typing import NDArray

from mt_data.datasets.gpt import GPTDataset, TokenSource
from mt_data.datasets.identity import random_bits
from mt_data.datasets.middle import FillInMiddle
from mt_data.datasets.special_ids import special_ids
from mt_data.error import DataError

_PROBES = ("a", " B\n\n\t\u00e9")  # no letter may change, and no space may come before


class FillInMiddleDataset(GPTDataset):
    """Samples of a `GPTDataset` in which some texts have their middle at the end.

    The part of a document in a sample is a text. The text is cut at two characters, drawn
    uniformly, and the three pieces are encoded anew:

        PSM  [prefix] prefix [suffix] suffix [middle] middle
        SPM  [prefix] [suffix] suffix [middle] prefix middle

    An end-of-document token stays the last one. The text keeps its number of tokens: the end of the
    suffix, and if the suffix is too short the beginning of the prefix, makes room for the three
    special tokens. A text without room, or with another special token, stays unchanged. Random
    choices depend on the seed, the epoch, the document and the text's place in it alone.

    Args:
        indexed: The source of tokens.
        tokenizer: The tokenizer of the tokens, which is byte-level.
        fill: The share and the form of the rearranged texts.
        options: Further arguments of `GPTDataset`.

    Raises:
        DataError: The tokenizer lacks a special token, or does not keep all characters.
    """

    def __init__(
        self, indexed: TokenSource, *, tokenizer: Tokenizer, fill: FillInMiddle, **options: Any
    ) -> None:
        super().__init__(indexed, **options)
        if any(tokenizer.decode_bytes(tokenizer.encode(x)) != x.encode() for x in _PROBES):
            raise DataError(
                "fill in the middle needs a byte-level tokenizer, and this one changes a text or "
                "puts a space before it; leave it out, or use another tokenizer"
            )
        self._tokenizer, self._fill = tokenizer, fill
        self._seed = operator.index(options.get("seed", 0))
        names = {"prefix": fill.prefix, "suffix": fill.suffix, "middle": fill.middle}
        self._ids = special_ids(tokenizer, names)
        self._special = np.array(sorted(tokenizer.special_tokens.values()))

    def sample(self, index: int, begin: int = 0, end: int | None = None) -> NDArray[np.int64]:
        """Return tokens [begin, end) of sample `index` in the endless stream of epochs."""
        index, end = operator.index(index), self._end(begin, end)
        tokens, at = super().sample(index), 0
        stream, start = self._find(index)
        epoch = index // self.samples_per_epoch
        count = min(len(tokens), stream.num_tokens - start)
        for document, offset, length in stream.pieces(start, count):
            own = slice(at, at + length)
            key = epoch, self.sequences[document], offset
            tokens[own] = self._arranged(tokens[own], key)
            at += length
        return tokens[begin:end]

    def _arranged(self, tokens: NDArray[np.int64], key: tuple[int, ...]) -> NDArray[np.int64]:
        """Return the text rearranged or unchanged, with the same number of tokens."""
        bits = random_bits(4, self._seed, "fill in the middle", *key) >> np.uint64(11)
        is_cut, is_spm, *cuts = bits.astype(np.float64) * 2.0**-53
        if is_cut >= self._fill.rate:
            return tokens
        has_end = tokens[-1] == self._tokenizer.eod_id
        body, ending = np.split(tokens, [len(tokens) - has_end])
        if np.isin(body, self._special).any():
            return tokens
        # A sample may begin or end within a character, whose bytes are left out.
        text = self._tokenizer.decode_bytes(body).decode("utf-8", "ignore")
        low, high = sorted(int(cut * (len(text) + 1)) for cut in cuts)
        pieces = text[:low], text[low:high], text[high:]
        prefix, middle, suffix = self._tokenizer.encode_batch(pieces)
        over = len(prefix) + len(middle) + len(suffix) + len(self._ids) - len(body)
        if not 0 <= over <= len(prefix) + len(suffix):
            return tokens
        prefix = prefix[max(over - len(suffix), 0) :]
        suffix = suffix[: max(len(suffix) - over, 0)]
        begin, gap, fill = self._ids["prefix"], self._ids["suffix"], self._ids["middle"]
        if is_spm < self._fill.spm_rate:
            found = [begin, gap, *suffix, fill, *prefix, *middle]
        else:
            found = [begin, *prefix, gap, *suffix, fill, *middle]
        return np.array([*found, *ending], np.int64)
