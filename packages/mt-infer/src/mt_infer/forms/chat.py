"""Fields of the body of `/v1/chat/completions`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from mt_files import Checks, to_plain

from mt_infer.forms.choosing import MOST_TOP, Choosing, TextFormat

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)
_OWN = frozenset({"self", "messages", "tools", "add_generation_prompt"})


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a message."""


@dataclass(frozen=True, kw_only=True)
class TextPart(Part):
    """A text.

    Attributes:
        text: The text.
    """

    type_name: ClassVar[str] = "text"

    text: str


@dataclass(frozen=True, kw_only=True)
class ImageUrl:
    """The place of an image.

    Attributes:
        url: A `data:` URL; nothing is fetched.
        detail: Ignored; images have the model's size.
    """

    url: str
    detail: Literal["auto", "low", "high"] = "auto"


@dataclass(frozen=True, kw_only=True)
class ImagePart(Part):
    """An image.

    Attributes:
        image_url: Place of the image.
    """

    type_name: ClassVar[str] = "image_url"

    image_url: ImageUrl


@dataclass(frozen=True, kw_only=True)
class FunctionFields:
    """A function that the model may call.

    Attributes:
        name: Its name.
        description: Purpose of the function.
        parameters: JSON schema of its arguments.
        strict: Ignored; arguments follow the schema if `tool_choice` asks for a call.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    strict: bool = False

    def __post_init__(self) -> None:
        checks = Checks(self)
        if not _NAME.fullmatch(self.name):
            checks.add("name", f"{self.name[:80]!r}; use 1 to 64 letters, digits, _ and -")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class Function(FunctionFields):
    """The function of a tool."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool.

    Attributes:
        type: Its kind.
        function: The function.
    """

    type: Literal["function"]
    function: Function


@dataclass(frozen=True, kw_only=True)
class FunctionName:
    """The name of a function.

    Attributes:
        name: The name.
    """

    name: str


@dataclass(frozen=True, kw_only=True)
class NamedTool:
    """The tool that must be called.

    Attributes:
        type: Its kind.
        function: The function.
    """

    type: Literal["function"]
    function: FunctionName


@dataclass(frozen=True, kw_only=True)
class CalledFunction:
    """A function with its arguments.

    Attributes:
        name: The name.
        arguments: JSON text of an object with the arguments.
    """

    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call by the assistant.

    Attributes:
        id: Its id.
        type: Kind of the tool.
        function: The function and its arguments.
    """

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message of a conversation.

    Attributes:
        role: Role of the speaker; `developer` counts as `system`.
        content: The text, or its parts.
        name: Name of the speaker, or of the called function.
        tool_calls: Calls of functions, by the assistant.
        tool_call_id: Id of the call with this result.
        reasoning_content: Reasoning of the assistant.
        refusal: Text of a refusal, in place of the content.
        annotations: Not read.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | tuple[Part, ...] | None = None
    name: str | None = None
    tool_calls: tuple[Call, ...] = ()
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        checks = Checks(self)
        if self.content is None and self.role != "assistant":
            checks.add("content", "missing; only the assistant may say nothing")
        if self.tool_calls and self.role != "assistant":
            checks.add("tool_calls", f"{self.role!r} makes no calls; only the assistant does")
        if self.images and self.role != "user":
            checks.add("content", f"{self.role!r} shows no images; only the user does")
        checks.done()

    @property
    def images(self) -> list[str]:
        """URLs of its images."""
        parts = self.content if isinstance(self.content, tuple) else ()
        return [each.image_url.url for each in parts if isinstance(each, ImagePart)]

    @property
    def plain(self) -> dict[str, Any]:
        """The message as chat templates read it: texts are joined."""
        found: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.refusal if self.content is None else self.content,
        }
        if isinstance(self.content, tuple):
            found["content"] = _plain_parts(self.content)
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        if self.tool_calls:
            found["tool_calls"] = to_plain(self.tool_calls)
        return found


def _plain_parts(parts: tuple[Part, ...]) -> str | list[dict[str, str]]:
    """Return texts joined by line feeds; with images, a list for templates of multimodal models."""
    texts = [each.text for each in parts if isinstance(each, TextPart)]
    if len(texts) == len(parts):
        return "\n".join(texts)
    return [
        {"type": "text", "text": each.text} if isinstance(each, TextPart) else {"type": "image"}
        for each in parts
    ]


@dataclass(frozen=True, kw_only=True)
class ChatForm(Choosing):
    """Body of `/v1/chat/completions`.

    Attributes:
        messages: The conversation.
        max_tokens: Largest number of tokens; None for the rest of the context.
        max_completion_tokens: Newer name of `max_tokens`.
        logprobs: Whether to report the logprobs of tokens.
        top_logprobs: Number of most likely tokens to report for each.
        tools: Functions that the model may call.
        tool_choice: Whether the model may or must call a function, or the function to call.
        parallel_tool_calls: Whether an answer may have several calls.
        reasoning_effort: For the chat template.
        chat_template_kwargs: Further variables of the chat template.
        modalities: Kinds of answers.
        store: Nothing is stored.
    """

    NOT_SERVED: ClassVar[Mapping[str, str]] = {
        "functions": "use tools",
        "function_call": "use tool_choice",
        "audio": "answers are text",
        "web_search_options": "nothing is fetched",
        "prediction": "leave it out",
        "verbosity": "leave it out",
        "moderation": "leave it out",
    }

    messages: tuple[Message, ...]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    modalities: tuple[Literal["text"], ...] = ("text",)
    store: bool = False

    def _check(self, checks: Checks) -> None:
        super()._check(checks)
        checks.at_least(1, "max_tokens", "max_completion_tokens")
        checks.at_least(0, "top_logprobs")
        checks.at_most(MOST_TOP, "top_logprobs")
        if not self.messages:
            checks.add("messages", "an empty list; give one message or more")
        if self.top_logprobs is not None and not self.logprobs:
            checks.add("top_logprobs", "needs logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            checks.add("max_tokens", "max_completion_tokens is given too; leave one out")
        if self.store:
            checks.add("store", "true is not served, because nothing is stored; leave it out")
        if wrong := _OWN & self.chat_template_kwargs.keys():
            checks.add("chat_template_kwargs", f"{min(wrong)!r} has a field of its own")
        self._check_tools(checks)

    def _check_tools(self, checks: Checks) -> None:
        names = [each.function.name for each in self.tools]
        if len(set(names)) < len(names):
            checks.add("tools", "two functions have the same name; rename one")
        must = self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)
        if must and not names:
            checks.add("tool_choice", "asks for a call, and there are no tools; give tools")
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            if names and name not in names:
                checks.add("tool_choice", f"{name[:80]!r} is not one of the tools")
        has_form = self.regex or self.grammar or not isinstance(self.response_format, TextFormat)
        if must and has_form:
            checks.add("tool_choice", "asks for a call, which has its own form; use auto")

    @property
    def limit(self) -> int | None:
        """Largest number of tokens."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        if self.tool_choice == "none":
            return ()
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return tuple(each for each in self.tools if each.function.name == name)
        return self.tools

    @property
    def must_call(self) -> bool:
        """Whether the answer is a call."""
        return self.tool_choice not in ("none", "auto")

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        effort = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else {}
        return {**effort, **self.chat_template_kwargs}
