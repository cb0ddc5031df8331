"""Speakers that answer conversations: a model in this process, or one on a server."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, cast

from mt_files import build
from mt_parallel_state import stop_signals
from mt_tokenizer import (
    AnswerEvent,
    AnswerForm,
    AnswerParser,
    ChatTemplate,
    Content,
    Reasoning,
    Tokenizer,
)

from mt_infer.chat.settings import Settings
from mt_infer.client import Client
from mt_infer.completion import Delta
from mt_infer.engine.engine import Engine
from mt_infer.text import PromptError

Message: TypeAlias = Mapping[str, str]
_TERMINATED = 143


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of an answer.

    Attributes:
        reason: Reason, such as `stop`, `length` or `context`.
    """

    reason: str


Said: TypeAlias = AnswerEvent | Ended
Parts: TypeAlias = Generator[Said, None, None]


class Speaker(Protocol):
    """A speaker that answers conversations."""

    def answer(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> Parts:
        """Yield the parts of an answer as they come.

        Args:
            messages: The conversation.
            settings: Fields of `Settings` that the user gave.

        Raises:
            KeyboardInterrupt: The user ended the answer.
        """
        ...


class LocalSpeaker:
    """A model in this process.

    Args:
        engine: Its engine.
        tokenizer: Its tokenizer.
        template: Its chat template; None writes conversations plainly.
        room: Largest number of tokens of a conversation.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, template: ChatTemplate | None, *, room: int
    ) -> None:
        self._engine, self._tokenizer, self._template = engine, tokenizer, template
        self._room = room
        self._form = AnswerForm() if template is None else AnswerForm.find(template.source)

    def answer(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> Parts:
        """See `Speaker`."""
        chosen = build(Settings, dict(settings))
        if self._template is None:
            prompt, sampling = plain_prompt(messages), chosen.sampling("\nUser:")
            tokens = self._tokenizer.encode_prompt(prompt)
        else:
            written, sampling = self._template.write(messages), chosen.sampling()
            prompt, tokens = written.text, self._tokenizer.encode_chat(written)
        parser, end = AnswerParser(self._form, prompt=prompt), None
        room = self._room - len(tokens)
        if room < 1:
            raise PromptError(
                f"the conversation has {len(tokens)} tokens, and there is room for {self._room}; "
                "/reset begins anew, and --context N makes more room"
            )
        sampling = replace(sampling, max_tokens=min(room, chosen.max_tokens))
        stream = cast("Generator[Delta]", self._engine.stream(tokens, sampling))
        with stop_signals() as stop, stop.deferred(), closing(stream):
            for delta in stream:
                yield from parser.feed(delta.text)
                if delta.completion is not None:
                    end = delta.completion.end
                    if end == "length" and room < chosen.max_tokens:
                        end = "context"
                if stop.requested:
                    break
        if stop.requested and stop.reason != "SIGINT":
            raise SystemExit(_TERMINATED)
        yield from parser.finish()
        if end is None:
            raise KeyboardInterrupt
        yield Ended(reason=end)


class RemoteSpeaker:
    """A model on a server with OpenAI's interface.

    Args:
        client: The server.
        model: Name of the model.
    """

    def __init__(self, client: Client, model: str) -> None:
        self._client, self._model = client, model

    def answer(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> Parts:
        """See `Speaker`."""
        body = {"model": self._model, "messages": [*messages], **settings}
        end = "stop"
        for event in self._client.stream("/chat/completions", body):
            choices = event.get("choices") or [{}]
            delta = choices[0].get("delta") or {}
            end = choices[0].get("finish_reason") or end
            if thought := delta.get("reasoning_content"):
                yield Reasoning(text=str(thought))
            if said := delta.get("content"):
                yield Content(text=str(said))
        yield Ended(reason=str(end))


def plain_prompt(messages: Sequence[Message]) -> str:
    """Return a conversation as plain text, for a model without a chat template."""
    names = {"user": "User: ", "assistant": "Assistant: ", "system": ""}
    turns = [f"{names[each['role']]}{each['content'].strip()}\n" for each in messages]
    return "".join(turns) + "Assistant:"
