"""The bodies of answers of `/v1/chat/completions`."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mt_tokenizer import (
    AnswerEvent,
    AnswerForm,
    AnswerParser,
    CallArguments,
    CallBegin,
    CallEnd,
    ChatAnswer,
    Content,
    Reasoning,
)

from mt_infer.answers.writer import ChoicesWriter, bounded, token_bytes
from mt_infer.backends.backend import Backend
from mt_infer.completion import Completion, Delta
from mt_infer.forms.chat import ChatForm
from mt_infer.prompts.ask import Ask
from mt_infer.prompts.calls import asked_calls, parser_of


class ChatWriter(ChoicesWriter):
    """A writer of the bodies of answers in a conversation.

    Args:
        backend: The engine.
        form: The fields of the request.
        ask: The engine's task.
        marks: The model's marks of the parts of its answers.
    """

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, backend: Backend, form: ChatForm, ask: Ask, marks: AnswerForm) -> None:
        super().__init__(backend, form, ask)
        assert backend.tokenizer is not None, "the prompt was rendered"  # noqa: S101
        self._tokenizer, self._chat, self._marks = backend.tokenizer, form, marks
        self._streams = {n: _Stream(self._parser(), form) for n in range(form.n)}

    def choice(self, index: int, found: Completion) -> dict[str, Any]:
        """Return a whole choice."""
        parser = self._parser()
        events = [*parser.feed(found.text or ""), *parser.finish()]
        answer = ChatAnswer.of(asked_calls(events, self._chat))
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [
                {
                    "id": call_id(),
                    "type": "function",
                    "function": {"name": each.name, "arguments": each.arguments},
                }
                for each in answer.calls
            ]
        logprobs = None
        if self._chat.logprobs:
            logprobs = self._tokens(found.tokens, found.logprobs, found.top_logprobs)
        end = _end_of(found, has_calls=bool(answer.calls))
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": end}

    def parts(self, delta: Delta) -> Iterable[dict[str, Any]]:
        """Return the choices of the chunks of a delta."""
        stream, found = self._streams[delta.index], delta.completion
        logprobs = None
        if self._chat.logprobs:
            logprobs = self._tokens(delta.tokens, delta.logprobs, delta.top_logprobs)
        changes = stream.changes(delta.text, has_ended=found is not None)
        if logprobs and delta.tokens and not changes:
            changes = [{}]
        common = {"index": delta.index, "finish_reason": None}
        for number, change in enumerate(changes):
            yield {**common, "delta": change, "logprobs": None if number else logprobs}
        if found is not None:
            end = _end_of(found, has_calls=stream.has_calls)
            yield {**common, "delta": {}, "logprobs": None, "finish_reason": end}

    def _parser(self) -> AnswerParser:
        return parser_of(self._marks, self._chat, self.ask.prompts[0].text or "")

    def _tokens(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float] | None,
        tops: Sequence[Mapping[int, float]] | None,
    ) -> dict[str, Any]:
        """Return the logprobs of tokens."""
        found = []
        for number, (token, logprob) in enumerate(zip(tokens, logprobs or (), strict=True)):
            top = tops[number].items() if tops else ()
            likely = [self._token(*each) for each in top]
            found.append({**self._token(token, logprob), "top_logprobs": likely})
        return {"content": found, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        content = token_bytes(self._tokenizer, token)
        shown = content.decode(errors="replace")
        return {"token": shown, "logprob": bounded(logprob), "bytes": list(content)}


class _Stream:
    """The events of one choice as changes of its message.

    Args:
        parser: Parser of the answer's parts.
        form: The fields of the request.

    Attributes:
        has_calls: Whether a function was called.
    """

    def __init__(self, parser: AnswerParser, form: ChatForm) -> None:
        self._parser, self._form = parser, form
        self._has_begun = self.has_calls = False

    def changes(self, text: str, *, has_ended: bool) -> list[dict[str, Any]]:
        """Return the changes that a text makes to the message."""
        events = self._parser.feed(text) + (self._parser.finish() if has_ended else [])
        found = [] if self._has_begun else [{"role": "assistant", "content": ""}]
        self._has_begun = True
        for event in asked_calls(events, self._form):
            self.has_calls |= isinstance(event, CallEnd) and event.is_whole
            change = _change(event)
            if change is not None:
                found.append(change)
        return found


def _change(event: AnswerEvent) -> dict[str, Any] | None:
    match event:
        case Content():
            return {"content": event.text}
        case Reasoning():
            return {"reasoning_content": event.text}
        case CallBegin():
            function = {"name": event.name, "arguments": ""}
            call = {"id": call_id(), "type": "function", "function": function}
            return {"tool_calls": [{"index": event.index, **call}]}
        case CallArguments():
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
        case CallEnd():
            return None


def _end_of(found: Completion, *, has_calls: bool) -> str:
    if found.end != "stop":
        return "length"
    return "tool_calls" if has_calls else "stop"


def call_id() -> str:
    """Return the id of a call: nine letters and digits, as Mistral's templates require."""
    return uuid.uuid4().hex[:9]
