"""The choice of the tokens that masked language modelling predicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mt_data.error import DataError, at_least, one_of

Spans: TypeAlias = Literal["none", "geometric", "ngrams"]
_RATIO = 0.8  # 1 - p with SpanBERT's p = 0.2


@dataclass(frozen=True, kw_only=True)
class Masking:
    """The choice of tokens to predict, and their replacements.

    Attributes:
        fraction: Share of the ordinary tokens to predict; at least one token is chosen.
        masked: Share of the chosen tokens to replace by the mask token.
        random: Share of the chosen tokens to replace by a random ordinary token. The other chosen
            tokens stay.
        whole_words: Whether to choose whole words, as long as they fit the fraction.
        spans: Lengths of the spans to choose, in words or else tokens: "geometric" with ratio 0.8,
            as in SpanBERT (Joshi et al., 2020), or "ngrams", where a length n has a share in
            proportion to 1 / n. All tokens of a span become the mask token, or random ones, or
            stay. "none" chooses words or tokens one by one.
        longest: Length of the longest span. The shares of all lengths up to it sum to 1; with
            SpanBERT's 10 the mean length is 3.8.
    """

    fraction: float = 0.15
    masked: float = 0.8
    random: float = 0.1
    whole_words: bool = False
    spans: Spans = "none"
    longest: int = 10

    def __post_init__(self) -> None:
        one_of(Spans, spans=self.spans)
        at_least(1, longest=self.longest)
        if not 0 < self.fraction <= 1:
            raise DataError(f"fraction is {self.fraction}; it must lie above 0 and be at most 1")
        shares = self.masked, self.random
        if min(shares) < 0 or sum(shares) > 1 + 1e-9:
            raise DataError(
                f"masked is {self.masked} and random {self.random}; both must be 0 or more, and "
                "their sum at most 1"
            )

    def shares(self) -> NDArray[np.float64]:
        """Return the shares of spans of 1, 2, ... words or tokens, which sum to 1."""
        lengths = np.arange(1, 1 + (1 if self.spans == "none" else self.longest))
        shares = 1 / lengths if self.spans == "ngrams" else _RATIO ** (lengths - 1.0)
        return shares / shares.sum()

    def identity(self) -> dict[str, object]:
        """Return the fields that decide rows; without spans, the fields of spans are left out."""
        fields = asdict(self)
        if self.spans == "none":
            del fields["spans"], fields["longest"]
        return fields

    def choose(
        self,
        places: NDArray[np.int64],
        starts: NDArray[np.bool_],
        draw: Callable[[str], NDArray[np.float64]],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the places of the tokens to predict, in order, and the deciding place of each.

        The first token of a span decides the replacement of the whole span; without spans each
        token decides its own.

        Args:
            places: Places of the ordinary tokens in a row, [N].
            starts: Whether each ordinary token begins a word, [N].
            draw: Function that returns N numbers in [0, 1) for a purpose.
        """
        if not len(places):
            return places, places
        drawn = draw("places")
        count = max(1, int(self.fraction * len(places) + 0.5))
        if self.spans == "none" and not self.whole_words:
            chosen = np.sort(places[np.argsort(drawn, kind="stable")[:count]])
            return chosen, chosen
        apart = np.diff(places, prepend=places[0] - 2) != 1
        starts = starts | apart if self.whole_words else np.ones(len(places), bool)
        begins = np.append(np.flatnonzero(starts), len(places))
        order = np.argsort(drawn[starts], kind="stable")
        sizes = np.ones(len(order), np.int64)
        if self.spans != "none":
            ends = np.cumsum(self.shares())[:-1]
            sizes += np.searchsorted(ends, draw("lengths")[starts], side="right")
        found = sorted(_spans(begins, np.cumsum(apart)[begins[:-1]], order, sizes, count))
        chosen = np.concatenate([places[begin:end] for begin, end in found])
        if self.spans == "none":
            return chosen, chosen
        return chosen, np.repeat([places[begin] for begin, _ in found], [e - b for b, e in found])


def _spans(
    begins: NDArray[np.int64],
    runs: NDArray[np.int64],
    order: NDArray[np.int64],
    lengths: NDArray[np.int64],
    count: int,
) -> list[tuple[int, int]]:
    """Return at least one span; several spans have at most `count` tokens together.

    A span is shortened until it fits and stays in one run of text, and left out if it would
    overlap another.

    Args:
        begins: First token of each word (or of each token as a word), and the number of tokens.
        runs: Number of the run of text of each word.
        order: Words in the order in which spans begin with them.
        lengths: Number of words of the span that begins with each word.
        count: Number of tokens to choose.
    """
    spans: list[tuple[int, int]] = []
    free, left = np.ones(len(runs), bool), count
    for word in order:
        end = min(word + int(lengths[word]), int(np.searchsorted(runs, runs[word], side="right")))
        while end > word + 1 and begins[end] - begins[word] > left:
            end -= 1
        size = int(begins[end] - begins[word])
        if free[word:end].all() and (size <= left or not spans):
            spans.append((int(begins[word]), int(begins[end])))
            free[word:end] = False
            left -= size
        if left <= 0:
            break
    return spans
