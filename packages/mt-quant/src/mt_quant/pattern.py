"""Regular expressions that match in linear time, for patterns out of files.

Python's `re` may take exponential time, and a config.json is somebody else's. These patterns are
matched by following all alternatives at once (Thompson, 1968): time is at most the pattern's length
times the text's, and states once seen are looked up.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from mt_files import shorten

from mt_quant.error import QuantizationError

MAX_PATTERN = 500
_MAX_GROUPS = 50
_MAX_STATES = 5000
_MAX_REPEAT = 100
_MAX_CACHED = 20_000
_TAKEN = "letters, classes, groups, alternatives, * + ? {n,m}, ^ and $"
_COUNTS = re.compile(r"\{(\d{0,4})(,?)(\d{0,4})\}")
# One character: a class, a class by its letter, an escaped sign, or a sign without a meaning.
_ONE = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\[dDwWsS]|\\[^a-zA-Z0-9]|[^\\()\[\]|*+?{}^$]")
_ANCHORS = {"^": "start", "$": "end", r"\A": "start", r"\Z": "end"}

_State = int
_Test = Callable[[str], bool]


class Pattern:
    """A pattern that matches in linear time.

    Args:
        text: A regular expression of literals, classes, groups, alternatives, repeats and anchors.

    Raises:
        QuantizationError: It is too long, or has a part that can't be matched in linear time, such
            as a reference to a group or a look ahead.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > MAX_PATTERN or text.count("(") > _MAX_GROUPS:
            raise QuantizationError(
                f"pattern {shorten(text)} has more than {MAX_PATTERN} characters or {_MAX_GROUPS} "
                "groups; shorten it"
            )
        # Where a state leads: by a character of a test, freely, or where an anchor holds.
        self._tests: dict[_State, tuple[_Test, _State]] = {}
        self._free: dict[_State, tuple[_State, ...]] = {}
        self._anchored: dict[_State, tuple[str, _State]] = {}
        self._steps: dict[tuple[frozenset[_State], str], frozenset[_State]] = {}
        self._count = 0
        self._end = self._state()
        self._start, rest = self._alternatives(0, self._end)
        if rest < len(self.text):
            raise self._refused(rest, "a bracket is closed and never opened")

    def matches(self, text: str, *, whole: bool) -> bool:
        """Return whether the pattern matches a text, or with `whole=False` a beginning of it."""
        last = len(text)
        states = self._closure({self._start}, is_start=True, is_end=not text)
        for place, sign in enumerate(text, 1):
            if not whole and self._end in states:
                return True
            if not states:
                return False
            # An anchor may hold at the end only, so that step is not looked up.
            if place == last:
                states = self._after(states, sign, is_end=True)
                break
            key = states, sign
            if key not in self._steps:
                if len(self._steps) >= _MAX_CACHED:
                    self._steps.clear()
                self._steps[key] = self._after(states, sign, is_end=False)
            states = self._steps[key]
        return self._end in states

    def _after(self, states: frozenset[_State], sign: str, *, is_end: bool) -> frozenset[_State]:
        tests = (self._tests[state] for state in states if state in self._tests)
        return self._closure({to for test, to in tests if test(sign)}, is_end=is_end)

    def _closure(
        self, states: set[_State], *, is_start: bool = False, is_end: bool
    ) -> frozenset[_State]:
        """Return these states and all that follow without a character."""
        holds = {"start": is_start, "end": is_end}
        waiting, seen = list(states), set(states)
        while waiting:
            state = waiting.pop()
            found = self._free.get(state, ())
            if state in self._anchored:
                anchor, to = self._anchored[state]
                found = (to,) if holds[anchor] else ()
            for to in found:
                if to not in seen:
                    seen.add(to)
                    waiting.append(to)
        return frozenset(seen)

    # A pattern is read from the left; each part is built in front of the state that follows it, so
    # a part that repeats is read again.

    def _alternatives(self, place: int, to: _State) -> tuple[_State, int]:
        firsts = []
        while True:
            first, place = self._sequence(place, to)
            firsts.append(first)
            if self.text[place : place + 1] != "|":
                break
            place += 1
        return (firsts[0] if len(firsts) == 1 else self._state(*firsts)), place

    def _sequence(self, place: int, to: _State) -> tuple[_State, int]:
        # The end of each part must be known before the part in front of it is built.
        parts = []
        while place < len(self.text) and self.text[place] not in "|)":
            after = self._after_part(place)
            counts, end = self._repeat(after)
            parts.append((place, counts))
            place = end
        first = to
        for start, (least, most) in reversed(parts):
            first = self._repeated(start, least, most, first)
        return first, place

    def _repeated(self, start: int, least: int, most: int | None, to: _State) -> _State:
        if most is None:
            again = self._state()
            self._free[again] = (self._part(start, again), to)
            to = again
        else:
            for _ in range(most - least):
                to = self._state(self._part(start, to), to)
        for _ in range(least):
            to = self._part(start, to)
        return to

    def _repeat(self, place: int) -> tuple[tuple[int, int | None], int]:
        """Return how often a part repeats, and the place behind that."""
        sign = self.text[place : place + 1]
        counts: tuple[int, int | None] = (1, 1)
        if sign in ("*", "+", "?"):
            counts = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
            place += 1
        elif sign == "{":
            found = _COUNTS.match(self.text, place)
            if found is None or not found[1] + found[3]:
                raise self._refused(place, "a brace that is no count: write \\{")
            least = int(found[1] or 0)
            most = int(found[3]) if found[3] else None if found[2] else least
            if max(least, most or 0) > _MAX_REPEAT or (most is not None and most < least):
                raise self._refused(place, f"a count must be from 0 to {_MAX_REPEAT}")
            counts, place = (least, most), found.end()
        else:
            return counts, place
        sign = self.text[place : place + 1]
        if sign == "?":  # which of several matches is found does not matter
            place += 1
        elif sign in ("+", "*", "{"):
            raise self._refused(place, "a repeat of a repeat")
        return counts, place

    def _after_part(self, place: int) -> int:
        """Return the place behind one part."""
        if self.text[place] == "(":
            depth = 0
            while place < len(self.text):
                sign = self.text[place]
                depth += {"(": 1, ")": -1}.get(sign, 0)
                one = _ONE.match(self.text, place)
                place = one.end() if one is not None else place + (2 if sign == "\\" else 1)
                if not depth:
                    return place
            raise self._refused(len(self.text), "a bracket is never closed")
        for anchor in _ANCHORS:
            if self.text.startswith(anchor, place):
                return place + len(anchor)
        found = _ONE.match(self.text, place)
        if found is None:
            raise self._refused(place, "no part that is read")
        return found.end()

    def _part(self, place: int, to: _State) -> _State:
        """Build one part in front of a state."""
        self._spend()
        if self.text[place] == "(":
            inner = place + 1
            if self.text.startswith("?:", inner):
                inner += 2
            elif self.text.startswith("?", inner):
                raise self._refused(place, "a group of another kind than (...) or (?:...)")
            return self._alternatives(inner, to)[0]
        for sign, name in _ANCHORS.items():
            if self.text.startswith(sign, place):
                state = self._state()
                self._anchored[state] = (name, to)
                return state
        found = _ONE.match(self.text, place)
        if found is None:
            raise self._refused(place, "no part that is read")
        state = self._state()
        self._tests[state] = (_test(found[0]), to)
        return state

    def _state(self, *free: _State) -> _State:
        self._spend()
        if free:
            self._free[self._count] = free
        return self._count

    def _spend(self) -> None:
        """Bound the work and the memory of building."""
        self._count += 1
        if self._count > _MAX_STATES:
            raise QuantizationError(
                f"pattern {shorten(self.text)} has too many repeats of repeats; shorten it"
            )

    def _refused(self, place: int, problem: str) -> QuantizationError:
        return QuantizationError(
            f"pattern {shorten(self.text)}, character {place + 1}: {problem}; a pattern has "
            f"{_TAKEN}, and matches in linear time"
        )


@lru_cache(maxsize=4096)
def pattern_of(text: str) -> Pattern:
    """Return the cached pattern of a text, or a new one; see `Pattern`."""
    return Pattern(text)


@lru_cache(maxsize=4096)
def _test(text: str) -> _Test:
    """Return whether a character is of a class or is the letter itself, as `re` reads it."""
    try:
        found = re.compile(text)
    except re.error as error:
        raise QuantizationError(f"class {shorten(text)} is no class: {error}") from None
    return lambda sign: found.fullmatch(sign) is not None
