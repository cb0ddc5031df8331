"""Answers of a chat model: their parts as they come, and the whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, kw_only=True)
class Content:
    """More of the text for the user.

    Attributes:
        text: The text.
    """

    text: str


@dataclass(frozen=True, kw_only=True)
class Reasoning:
    """More of the text that the model writes for itself before it answers.

    Attributes:
        text: The text.
    """

    text: str


@dataclass(frozen=True, kw_only=True)
class CallBegin:
    """The model calls a function, whose arguments follow.

    Attributes:
        index: Number of the call in the answer.
        name: Name of the function.
    """

    index: int
    name: str


@dataclass(frozen=True, kw_only=True)
class CallArguments:
    """More of the JSON text of a call's arguments.

    Attributes:
        index: Number of the call in the answer.
        text: The text.
    """

    index: int
    text: str


@dataclass(frozen=True, kw_only=True)
class CallEnd:
    """The end of a call.

    Attributes:
        index: Number of the call in the answer.
        is_whole: Whether the arguments are a JSON object. If not, the call is void, and its text
            follows as content.
    """

    index: int
    is_whole: bool


AnswerEvent: TypeAlias = Content | Reasoning | CallBegin | CallArguments | CallEnd


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call of a function.

    Attributes:
        name: Name of the function.
        arguments: JSON text of an object with its arguments.
    """

    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class ChatAnswer:
    """A whole answer.

    Attributes:
        content: Text for the user.
        reasoning: Text that the model wrote for itself.
        calls: Calls of functions.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    @classmethod
    def of(cls, events: Iterable[AnswerEvent]) -> ChatAnswer:
        """Join the events of an answer; a call that is not whole is only in the content."""
        content, reasoning, calls = [], [], []
        name, arguments = "", []
        for event in events:
            match event:
                case Content():
                    content.append(event.text)
                case Reasoning():
                    reasoning.append(event.text)
                case CallBegin():
                    name, arguments = event.name, []
                case CallArguments():
                    arguments.append(event.text)
                case CallEnd(is_whole=True):
                    calls.append(ToolCall(name=name, arguments="".join(arguments)))
                case CallEnd():
                    pass
        return cls(content="".join(content), reasoning="".join(reasoning), calls=tuple(calls))
