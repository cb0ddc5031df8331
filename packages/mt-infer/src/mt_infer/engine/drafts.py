"""Guesses of the next tokens, which a pass verifies all at once."""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST, _SHORTEST = 4, 2
_WINDOW = 4096


def ngram_drafts(tokens: Sequence[int], most: int) -> list[int]:
    """Return the tokens that followed the last occurrence of the text's end.

    Args:
        tokens: The prompt and the continuation.
        most: Largest number of guesses.
    """
    recent = list(tokens[-_WINDOW:])
    for size in range(min(_LONGEST, len(recent) - 1), _SHORTEST - 1, -1):
        end = recent[-size:]
        for start in range(len(recent) - size - 1, -1, -1):
            if recent[start] == end[0] and recent[start : start + size] == end:
                return recent[start + size : start + size + most]
    return []
