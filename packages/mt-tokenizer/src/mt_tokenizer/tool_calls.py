"""The forms of function calls in answers: Hermes and Qwen, Llama 3, Mistral, DeepSeek."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mt_tokenizer.answer import AnswerEvent, CallArguments, CallBegin, CallEnd
from mt_tokenizer.reader import Broken, Reader, Waiting, parse

CallForm: TypeAlias = Literal["hermes", "llama3", "mistral", "deepseek"]

_ARGUMENTS = ("arguments", "parameters")
_KEYS = {"name", "id", "type", *_ARGUMENTS}
_NAME = re.compile(r"[\w.:/-]", re.ASCII)
_MOST_NAME = 256

_CALLS_BEGIN = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
_CALLS_END = "<\uff5ctool\u2581calls\u2581end\uff5c>"
_CALL_BEGIN = "<\uff5ctool\u2581call\u2581begin\uff5c>"
_CALL_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"


class Calls:
    """Calls as they are read.

    Args:
        names: Names of the functions that may be called.
        emit: Takes the events.

    Attributes:
        index: Number of the next call.
        num_whole: Number of whole calls.
    """

    def __init__(self, names: Collection[str], emit: Callable[[AnswerEvent], None]) -> None:
        self.index = self.num_whole = 0
        self._names, self._emit = frozenset(names), emit
        self._is_open = False

    def begin(self, name: object) -> None:
        """Begin a call."""
        if self._is_open or not isinstance(name, str) or name not in self._names:
            raise Broken
        self._is_open = True
        self._emit(CallBegin(index=self.index, name=name))

    def more(self, text: str) -> None:
        """Add text to the arguments."""
        if text:
            self._emit(CallArguments(index=self.index, text=text))

    def end(self, *, is_whole: bool = True) -> None:
        """End the open call, if there is one."""
        if self._is_open:
            self._emit(CallEnd(index=self.index, is_whole=is_whole))
            self._is_open, self.index = False, self.index + 1
            self.num_whole += is_whole


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form of calls.

    Attributes:
        mark: Text before the first call.
        read: Reads calls behind the mark, and yields the place behind each.
        is_bare: Whether a call at the beginning of an answer needs no mark.
    """

    mark: str
    read: Callable[[Reader, Calls, Callable[[], None]], Waiting[None]]
    is_bare: bool = False


def _hermes(reader: Reader, calls: Calls, keep: Callable[[], None]) -> Waiting[None]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    yield from _call(reader, calls)
    yield from reader.take_behind_space("</tool_call>")
    keep()


def _llama3(reader: Reader, calls: Calls, keep: Callable[[], None]) -> Waiting[None]:
    """`{"name": ..., "parameters": {...}}; {...}`."""
    while True:
        yield from _call(reader, calls, is_bare=True)
        keep()
        if not (yield from reader.take_behind_space(";")):
            return


def _mistral(reader: Reader, calls: Calls, keep: Callable[[], None]) -> Waiting[None]:
    """`[{"name": ..., "arguments": {...}}, ...]`, or `name[ARGS]{...}` of newer models."""
    if (yield from reader.take_behind_space("[")):
        while True:
            yield from _call(reader, calls)
            keep()
            if (yield from reader.take_behind_space("]")):
                keep()
                return
            yield from reader.expect(",")
    if (yield from reader.skip_space()) == "{":
        yield from _call(reader, calls)
    else:
        name = yield from reader.matching(_NAME, _MOST_NAME)
        if (yield from reader.take("[CALL_ID]")):
            yield from reader.matching(_NAME, _MOST_NAME)
        yield from reader.take("[ARGS]")
        yield from _arguments(reader, calls, name)
    keep()


def _deepseek(reader: Reader, calls: Calls, keep: Callable[[], None]) -> Waiting[None]:
    """Calls between marks: name and arguments, or `function`, name and a block of JSON."""
    while (yield from reader.take_behind_space(_CALL_BEGIN)):
        name = yield from reader.matching(_NAME, _MOST_NAME)
        yield from reader.expect(_SEPARATOR)
        is_block = (yield from reader.skip_space()) != "{"
        if is_block:
            name = yield from reader.matching(_NAME, _MOST_NAME)
            yield from reader.expect("```json")
        yield from _arguments(reader, calls, name)
        if is_block:
            yield from reader.take_behind_space("```")
        yield from reader.take_behind_space(_CALL_END)
        keep()
    yield from reader.expect(_CALLS_END)
    keep()


def _call(reader: Reader, calls: Calls, *, is_bare: bool = False) -> Waiting[None]:
    """Read an object with a name and arguments.

    Args:
        reader: The text.
        calls: Takes the call.
        is_bare: Whether the object may be something else than a call: an unknown key decides.
    """
    yield from reader.expect("{")
    seen: set[str] = set()
    early = None  # arguments that came before the name
    while True:
        yield from reader.skip_space()
        key = yield from reader.string()
        if key in seen or (is_bare and key not in _KEYS):
            raise Broken
        seen.add("arguments" if key in _ARGUMENTS else key)
        yield from reader.expect(":")
        yield from reader.skip_space()
        if key == "name":
            calls.begin((yield from reader.string()))
        elif key not in _ARGUMENTS:
            yield from reader.value()
        elif "name" in seen:
            yield from _value(reader, calls)
        else:
            early = yield from reader.value()
        if (yield from reader.take_behind_space("}")):
            break
        yield from reader.expect(",")
    if "name" not in seen:
        raise Broken
    if early is not None:
        calls.more(_object(early))
    elif "arguments" not in seen:
        calls.more("{}")
    calls.end()


def _arguments(reader: Reader, calls: Calls, name: str) -> Waiting[None]:
    """Read the arguments of a named call, and end it."""
    if (yield from reader.skip_space()) != "{":
        raise Broken
    calls.begin(name)
    yield from _value(reader, calls)
    calls.end()


def _value(reader: Reader, calls: Calls) -> Waiting[None]:
    """Read arguments; an object comes out as it comes."""
    text = yield from reader.value(calls.more)
    if text[0] != "{":
        calls.more(_object(text))


def _object(text: str) -> str:
    """Return the JSON text of arguments; some models write it as a string, or null for none."""
    value = parse(text)
    if value is None:
        return "{}"
    if isinstance(value, str):
        text, value = value, parse(value)
    if not isinstance(value, dict):
        raise Broken
    return text


FORMS: Mapping[CallForm, Form] = {
    "hermes": Form(mark="<tool_call>", read=_hermes),
    "llama3": Form(mark="<|python_tag|>", read=_llama3, is_bare=True),
    "mistral": Form(mark="[TOOL_CALLS]", read=_mistral),
    "deepseek": Form(mark=_CALLS_BEGIN, read=_deepseek),
}
