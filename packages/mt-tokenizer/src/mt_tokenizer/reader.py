"""Text that comes in pieces, read forward; JSON values in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Any, NoReturn, TypeAlias, TypeVar

_Value = TypeVar("_Value")
Waiting: TypeAlias = Generator[None, None, _Value]  # yields where it needs more text

_SPACE = " \t\r\n"
_CLOSES = {"{": "}", "[": "]"}
_WORD = re.compile(r"[-+.\w]", re.ASCII)  # of numbers, true, false and null
_BETWEEN = ",:" + _SPACE
_MOST_NESTED, _MOST_DIGITS = 100, 4096


class Broken(Exception):  # noqa: N818 - it is no error of the program
    """The text has another form than expected."""


class Reader:
    """A text of which the end is not there yet, and a place in it.

    Attributes:
        text: The text from the last `drop` on.
        at: Place in it.
        has_ended: Whether no more text comes.
    """

    def __init__(self) -> None:
        self.text, self.at, self.has_ended = "", 0, False
        self._before_waiting: Callable[[], None] | None = None

    def drop(self) -> None:
        """Forget the text before the place."""
        self.text, self.at = self.text[self.at :], 0

    def peek(self) -> Waiting[str]:
        """Return the next character; an empty text at the end."""
        while self.at == len(self.text) and not self.has_ended:
            if self._before_waiting is not None:
                self._before_waiting()
            yield
        return self.text[self.at : self.at + 1]

    def skip_space(self) -> Waiting[str]:
        """Skip white space, and return the next character."""
        while (char := (yield from self.peek())) and char in _SPACE:
            self.at += 1
        return char

    def take(self, mark: str) -> Waiting[bool]:
        """Skip a mark, and return whether it was there."""
        while True:
            found = self.text[self.at : self.at + len(mark)]
            if found == mark:
                self.at += len(mark)
                return True
            if self.has_ended or not mark.startswith(found):
                return False
            yield

    def take_behind_space(self, mark: str) -> Waiting[bool]:
        """Skip white space and a mark if the mark is there, and return whether it was."""
        begin = self.at
        yield from self.skip_space()
        if (yield from self.take(mark)):
            return True
        self.at = begin
        return False

    def expect(self, mark: str) -> Waiting[None]:
        """Skip white space and a mark."""
        if not (yield from self.take_behind_space(mark)):
            raise Broken

    def matching(self, pattern: re.Pattern[str], most: int) -> Waiting[str]:
        """Return the next characters, up to `most`, that match a pattern one by one."""
        begin = self.at
        while (char := (yield from self.peek())) and pattern.fullmatch(char):
            self.at += 1
            if self.at - begin > most:
                raise Broken
        return self.text[begin : self.at]

    def string(self) -> Waiting[str]:
        """Read a JSON string, and return its value."""
        begin = self.at
        yield from self._skip_string()
        return parse(self.text[begin : self.at])

    def value(self, emit: Callable[[str], None] | None = None) -> Waiting[str]:
        """Read a JSON value, and return its text.

        Args:
            emit: Takes the text of an object as it comes; None waits for the whole.
        """
        begin = sent = self.at

        def send() -> None:
            nonlocal sent
            if emit is not None:
                emit(self.text[sent : self.at])
            sent = self.at

        if emit is not None and (yield from self.peek()) == "{":
            self._before_waiting = send
        try:
            yield from self._skip_value()
            text = self.text[begin : self.at]
            parse(text)
        finally:
            if self._before_waiting is not None:
                send()  # of a wrong value too, so that the pieces make no difference
            self._before_waiting = None
        return text

    def _skip_value(self) -> Waiting[None]:
        """Skip a value, of which only strings and brackets are checked; `parse` checks the rest."""
        closes: list[str] = []
        while True:
            char = yield from self.peek()
            if char == '"':
                yield from self._skip_string()
            elif _WORD.fullmatch(char):
                yield from self.matching(_WORD, _MOST_DIGITS)
            else:
                if char in _CLOSES:
                    closes.append(_CLOSES[char])
                elif closes and char == closes[-1]:
                    closes.pop()
                elif not closes or not char or char not in _BETWEEN:
                    raise Broken
                self.at += 1
            if len(closes) > _MOST_NESTED:
                raise Broken
            if not closes:
                return

    def _skip_string(self) -> Waiting[None]:
        if (yield from self.peek()) != '"':
            raise Broken
        self.at += 1
        while (char := (yield from self.peek())) != '"':
            if char < " ":  # a control character, or the end
                raise Broken
            self.at += 1
            if char == "\\":
                if not (yield from self.peek()):
                    raise Broken
                self.at += 1
        self.at += 1


def parse(text: str) -> Any:
    """Return the value of a JSON text, which has no NaN and no infinity.

    Raises:
        Broken: It is not one.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise Broken from None


def _refuse(_: str) -> NoReturn:
    raise ValueError
