"""Names of special tokens in messages: they are text, and only a template writes the tokens."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from mt_tokenizer.chat_text import ChatText

# Code points that Unicode reserves for programs; they stand for no character in any text.
_RESERVED = [
    *map(chr, range(0xFDD0, 0xFDF0)),
    *(chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF)),
]
_ANY = re.compile(f"[{''.join(_RESERVED)}]")
# A template may make a special token of a role, such as <|user|> of `user`.
_ROLES = {
    *("system", "developer", "user", "assistant", "model", "tool", "tools", "function", "ipython"),
    *("observation", "environment", "context", "documents", "tool_call", "tool_response"),
}


class Literals:
    """Marks the names of special tokens in what a template is given.

    A character of each is replaced by a code point that no text has; `restore` puts it back and
    says where it was. So a template can't take the name for a token, and the tokenizer won't.

    Args:
        names: Names of special tokens.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = sorted(filter(None, names), key=len, reverse=True)
        every = "|".join(map(re.escape, self._names)) or "(?!)"
        self._pattern = re.compile(f"(?:(?={every}))(.)", re.DOTALL)
        # A name may also be made of the end or the begin of a text and of what is beside it.
        ends = {name[:cut] for name in self._names for cut in range(1, len(name))}
        begins = {name[-cut:] for name in self._names for cut in range(1, len(name))}
        self._ends, self._begins = frozenset(ends), frozenset(begins)
        self._longest = max(map(len, self._names), default=1)

    def mark(self, given: Any) -> tuple[Any, dict[str, str]]:
        """Return JSON values with marked names, and the character that each mark stands for.

        Raises:
            ValueError: The values themselves have nearly all reserved code points.
        """
        taken = {char for text in _texts(given) for char in _ANY.findall(text)}
        free = iter([char for char in _RESERVED if char not in taken])
        marks: dict[str, str] = {}

        def mark_of(char: str) -> str:
            if char not in marks:
                found = next(free, None)
                if found is None:
                    raise ValueError("they have code points that Unicode reserves for programs")
                marks[char] = found
            return marks[char]

        marked = self._marked(given, mark_of)
        return marked, {mark: char for char, mark in marks.items()}

    def _marked(self, value: Any, mark_of: Any) -> Any:
        if isinstance(value, str):
            return self._text(value, mark_of)
        if isinstance(value, Mapping):
            found = {}
            for key, item in value.items():
                name = self._text(key, mark_of) if isinstance(key, str) else key
                inner = self._marked(item, mark_of)
                if key == "role" and isinstance(item, str) and self._is_inside(item):
                    inner = mark_of(item[0]) + item[1:]
                found[name] = inner
            return found
        if isinstance(value, list | tuple):
            return [self._marked(item, mark_of) for item in value]
        return value

    def _text(self, text: str, mark_of: Any) -> str:
        places = {found.start() for found in self._pattern.finditer(text)}
        for size in range(1, min(self._longest, len(text) + 1)):
            if text[-size:] in self._ends:
                places.add(len(text) - size)
            if text[:size] in self._begins:
                places.add(0)
        if not places:
            return text
        return "".join(mark_of(c) if at in places else c for at, c in enumerate(text))

    def _is_inside(self, role: str) -> bool:
        """Return whether a role that no template knows is a part of a special token's name."""
        return bool(role) and role not in _ROLES and any(role in name for name in self._names)


def restore(text: str, marks: Mapping[str, str], span: Sequence[str]) -> ChatText:
    """Return a text with the characters for which marks stand, and their places.

    Args:
        text: The text that a template wrote.
        marks: Character for which each mark stands.
        span: The marks of the begin and the end of what the assistant says, or empty texts.

    Raises:
        ValueError: A part of the assistant has no end.
    """
    if not marks and not any(span):
        return ChatText(text=text)
    found: list[str] = []
    literal: set[int] = set()
    spans: list[tuple[int, int]] = []
    opened: list[int] = []
    for char in text:
        if char in span:
            if char == span[0]:
                opened.append(len(found))
            elif opened:
                spans.append((opened.pop(), len(found)))
        elif char in marks:
            literal.add(len(found))
            found.append(marks[char])
        else:
            found.append(char)
    if opened:
        raise ValueError("a part of the assistant has no end")
    return ChatText(text="".join(found), literal=frozenset(literal), spans=tuple(sorted(spans)))


def free_marks(given: Any, count: int) -> list[str]:
    """Return reserved code points that do not occur in JSON values."""
    taken = {char for text in _texts(given) for char in _ANY.findall(text)}
    return [char for char in _RESERVED if char not in taken][:count]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
