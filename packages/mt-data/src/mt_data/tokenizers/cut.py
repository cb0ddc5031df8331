"""Cutting a long text where its token ids do not change.

A library that tokenizes needs hundreds of bytes of memory for each token at once, so a text of
megabytes is encoded in parts. A part ends only where encoding the surroundings as one gives the
same ids as encoding both sides apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from mt_data.error import DataError

PART = 1 << 18  # characters encoded at once
LONGEST = 1 << 21  # and at most, where there is no place to cut
CONTEXT = 128
_TRIES = 16
_WINDOW = 1 << 12
# After a word: before one blank, or one sign, and a word; before a number. Tokens that reach over
# such a place are rare, and whether one does is seen from its surroundings.
_PLACE = re.compile(r"(?<=\w)(?=\s\w)|(?<=\w)(?=[^\w\s]\w)|(?<=[^\W\d_])(?=\d)")
_Encode = Callable[[Sequence[str]], list[list[int]]]


def cut(text: str, encode: _Encode) -> Iterator[str]:
    """Yield parts of a text whose ids, joined, are the ids of the text.

    Args:
        text: Any length.
        encode: Gives the ids of texts.

    Raises:
        DataError: A stretch of more than `LONGEST` characters has no place to cut.
    """
    start = 0
    while len(text) - start > PART:
        place = _find(text, start, encode)
        if place is None:
            break
        end, start_of_next = place
        yield text[start:end]
        start = start_of_next
    yield text[start:]


def _find(text: str, start: int, encode: _Encode) -> tuple[int, int] | None:
    """Where the part from `start` ends and the next one begins; None for the rest as one part."""
    low, high = start + PART - _WINDOW, start + PART
    while low < len(text):
        if low - start > LONGEST:
            raise DataError(
                f"a text of {len(text)} characters has no place to cut it in the {LONGEST} "
                f"characters from {start} on: tokens cannot be made of it in bounded memory; cut "
                "it into documents, or leave it out"
            )
        places = [found.start() for found in _PLACE.finditer(text, low, min(high, len(text)))]
        for place in reversed(places[-_TRIES:]):
            for skipped in (0, 1) if text[place] == " " else (0,):
                if _is_safe(text, place, skipped, encode):
                    return place, place + skipped
        low, high = high, high + _WINDOW
    return None


def _is_safe(text: str, place: int, skipped: int, encode: _Encode) -> bool:
    """Whether cutting there, and leaving out one blank or none, changes no id.

    A tokenizer that puts a space before every text needs the blank left out.
    """
    before = text[max(0, place - CONTEXT) : place]
    after = text[place + skipped : place + skipped + CONTEXT]
    whole, left, right = encode([before + text[place : place + skipped] + after, before, after])
    return whole == left + right
