"""`POST /v1/chat/completions`."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from mt_tokenizer import (
    AnswerEvent,
    CallArguments,
    CallBegin,
    CallEnd,
    ChatAnswer,
    Content,
    Reasoning,
)
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mt_infer.completion import Completion, Delta
from mt_infer.forms.chat import ChatForm
from mt_infer.server.answers import Writer, bounded, streamed, token_bytes
from mt_infer.server.calls import asked_calls, call_grammar, parser_of
from mt_infer.server.prompts import Prompt
from mt_infer.server.routes.reading import ask_of, form_of
from mt_infer.server.serving import Ask, Serving

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat(request: Request) -> Response:
    """Continue a conversation."""
    serving, form = Serving.of(request), await form_of(request, ChatForm)
    prompt, ask = await asked_chat(serving, form)
    writer = _Writer(serving, form, [prompt], ask)
    if form.stream:
        return await streamed(request, ask, writer)
    return JSONResponse(writer.whole(await serving.completions(request, ask)))


async def asked_chat(serving: Serving, form: ChatForm) -> tuple[Prompt, Ask]:
    """Return the prompt of a conversation, and what the engine is asked."""
    prompt = await serving.prompts.chat(form)
    logprobs = (form.top_logprobs or 0) if form.logprobs or form.receipt else None
    how = {"grammar": call_grammar(form)} if form.must_call else {}
    return prompt, ask_of(serving, form, [prompt], max_tokens=form.limit, logprobs=logprobs, **how)


class _Writer(Writer):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self, serving: Serving, form: ChatForm, prompts: Sequence[Prompt], ask: Ask
    ) -> None:
        super().__init__(serving, form, prompts, ask)
        self._chat = form
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

    def _parser(self) -> Any:
        return parser_of(self.serving.prompts.form, self._chat, self.prompts[0].text or "")

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
        content = token_bytes(self.serving.prompts.tokenizer, token)
        shown = content.decode(errors="replace")
        return {"token": shown, "logprob": bounded(logprob), "bytes": list(content)}


class _Stream:
    """The events of one choice as changes of its message.

    Args:
        parser: Takes the answer apart.
        form: The fields of the request.

    Attributes:
        has_calls: Whether a function was called.
    """

    def __init__(self, parser: Any, form: ChatForm) -> None:
        self._parser, self._form = parser, form
        self._has_begun = self.has_calls = False

    def changes(self, text: str, *, has_ended: bool) -> list[dict[str, Any]]:
        """Return the changes of a message by a text."""
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
    """Return the id of a call, of the nine letters and digits that templates of Mistral take."""
    return uuid.uuid4().hex[:9]
