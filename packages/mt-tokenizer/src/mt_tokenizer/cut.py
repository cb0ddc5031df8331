"""Cutting of long texts at places where token ids do not change.

A tokenizer library needs hundreds of bytes of memory for each token, so a text of megabytes is
encoded in parts. A part ends only where encoding the surroundings together gives the same ids as
encoding both sides separately.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from mt_tokenizer.error import TokenizerError

PART = 1 << 18  # characters encoded at once
LONGEST = 1 << 21  # largest part if there is no place to cut
CONTEXT = 128
_TRIES = 16
_WINDOW = 1 << 12
# A place is after a word: before a space or a sign and another word, or before a number. Tokens
# across such a place are rare, and encoding its surroundings reveals them.
_PLACE = re.compile(r"(?<=\w)(?=\s\w)|(?<=\w)(?=[^\w\s]\w)|(?<=[^\W\d_])(?=\d)")
_Encode = Callable[[Sequence[str]], list[list[int]]]


def cut(text: str, encode: _Encode) -> Iterator[str]:
    """Yield parts of a text whose ids, joined, are the ids of the text.

    Args:
        text: A text of any length.
        encode: Function that returns the ids of texts.

    Raises:
        TokenizerError: More than `LONGEST` characters have no place to cut.
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
    """Return the end of the part from `start` and the start of the next; None at the last part."""
    low, high = start + PART - _WINDOW, start + PART
    while low < len(text):
        if low - start > LONGEST:
            raise TokenizerError(
                f"a text of {len(text)} characters has no place to cut it in the {LONGEST} "
                f"characters from {start} on, so it can't be tokenized in bounded memory; split it "
                "into documents, or leave it out"
            )
        places = [found.start() for found in _PLACE.finditer(text, low, min(high, len(text)))]
        for place in reversed(places[-_TRIES:]):
            for skipped in (0, 1) if text[place] == " " else (0,):
                if _is_safe(text, place, skipped, encode):
                    return place, place + skipped
        low, high = high, high + _WINDOW
    return None


def _is_safe(text: str, place: int, skipped: int, encode: _Encode) -> bool:
    """Return whether a cut that skips one space or none changes no id.

    For a tokenizer that puts a space before every text, the space must be skipped.
    """
    before = text[max(0, place - CONTEXT) : place]
    after = text[place + skipped : place + skipped + CONTEXT]
    whole, left, right = encode([before + text[place : place + skipped] + after, before, after])
    return whole == left + right
