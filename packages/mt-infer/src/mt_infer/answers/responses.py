"""The bodies of answers of `/v1/responses`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from mt_files import to_plain
from mt_tokenizer import (
    AnswerEvent,
    AnswerForm,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Reasoning,
)

from mt_infer.answers.chat import call_id
from mt_infer.backends.backend import Backend
from mt_infer.completion import Completion, Delta
from mt_infer.forms.response import ResponseForm
from mt_infer.prompts.ask import Ask
from mt_infer.prompts.calls import asked_calls, parser_of

_SHOWN = (
    "instructions",
    "max_output_tokens",
    "temperature",
    "top_p",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "text",
    "reasoning",
    "truncation",
)


class ResponseWriter:
    """A writer of the events of a response, and of the response itself.

    Args:
        backend: The engine.
        form: The fields of the request.
        ask: The engine's task.
        marks: The model's marks of the parts of its answers.
    """

    has_named_events: ClassVar[bool] = True

    def __init__(self, backend: Backend, form: ResponseForm, ask: Ask, marks: AnswerForm) -> None:
        self._backend, self._form, self._ask, self._chat = backend, form, ask, form.chat
        self._parser = parser_of(marks, self._chat, ask.prompts[0].text or "")
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._items: list[dict[str, Any]] = []
        self._is_open, self._number = False, 0
        self._found: Completion | None = None

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the body of a whole answer."""
        (found,) = completions
        for _ in self._parts(found.text or "", found):
            pass
        return self._response()

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Return the events of a delta."""
        if not self._number:
            for name in ("created", "in_progress"):
                yield self._event(name, response=self._response())
        yield from self._parts(delta.text, delta.completion)

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        """Return the events after the deltas."""
        whole = self._response()
        yield self._event(whole["status"], response=whole)

    def _parts(self, text: str, found: Completion | None) -> Iterator[dict[str, Any]]:
        events: Iterable[AnswerEvent] = self._parser.feed(text)
        if found is not None:
            self._found = found
            events = [*events, *self._parser.finish()]
        for event in asked_calls(events, self._chat):
            yield from self._changes(event)
        if found is not None:
            yield from self._close()

    def _changes(self, event: AnswerEvent) -> Iterator[dict[str, Any]]:
        """Return the events of a part of the answer."""
        match event:
            case Content():
                yield from self._open("message", role="assistant", content=[])
                if not self._item["content"]:
                    self._item["content"].append(_text_part(""))
                    yield self._event("content_part.added", of_part=True, part=_text_part(""))
                self._item["content"][0]["text"] += event.text
                more = {"delta": event.text, "logprobs": []}
                yield self._event("output_text.delta", of_part=True, **more)
            case Reasoning():
                part = {"type": "reasoning_text", "text": ""}
                yield from self._open("reasoning", summary=[], content=[part])
                self._item["content"][0]["text"] += event.text
                yield self._event("reasoning_text.delta", of_part=True, delta=event.text)
            case CallBegin():
                yield from self._close()
                how = {"call_id": call_id(), "name": event.name, "arguments": ""}
                yield from self._open("function_call", **how)
            case CallArguments():
                self._item["arguments"] += event.text
                yield self._event("function_call_arguments.delta", of_item=True, delta=event.text)
            case CallEnd():
                yield from self._close("completed" if event.is_whole else "incomplete")

    @property
    def _item(self) -> dict[str, Any]:
        """The last item."""
        return self._items[-1]

    def _open(self, kind: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Begin an item, unless an item of its kind is open."""
        if self._is_open and self._item["type"] == kind:
            return
        yield from self._close()
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
        self._items.append({**item, **fields})
        self._is_open = True
        yield self._event("output_item.added", of_output=True, item=_copy(self._item))

    def _close(self, status: str | None = None) -> Iterator[dict[str, Any]]:
        """End the open item."""
        if not self._is_open:
            return
        item, self._is_open = self._item, False
        has_room = self._found is None or self._found.end == "stop"
        item["status"] = status or ("completed" if has_room else "incomplete")
        if item["type"] == "function_call":
            done: dict[str, Any] = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("function_call_arguments.done", of_item=True, **done)
        else:
            part = item["content"][0]
            name = f"{part['type']}.done"
            done = {"text": part["text"]}
            if item["type"] == "message":
                done["logprobs"] = []
            yield self._event(name, of_part=True, **done)
            if item["type"] == "message":
                yield self._event("content_part.done", of_part=True, part=dict(part))
        yield self._event("output_item.done", of_output=True, item=_copy(item))

    def _event(
        self,
        kind: str,
        *,
        of_output: bool = False,
        of_item: bool = False,
        of_part: bool = False,
        **fields: Any,
    ) -> dict[str, Any]:
        """Return an event with the numbers of its output, item and part."""
        found = {"type": f"response.{kind}", "sequence_number": self._number, **fields}
        if of_output or of_item or of_part:
            found["output_index"] = len(self._items) - 1
        if of_item or of_part:
            found["item_id"] = self._item["id"]
        if of_part:
            found["content_index"] = 0
        self._number += 1
        return found

    def _response(self) -> dict[str, Any]:
        found, form = self._found, self._form
        status = "in_progress"
        if found is not None:
            status = "completed" if found.end == "stop" else "incomplete"
        body: dict[str, Any] = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "model": form.model or self._backend.facts.model,
            "output": [_copy(each) for each in self._items],
            "previous_response_id": None,
            "store": False,
            "metadata": {},
            "usage": None,
        }
        plain = to_plain(form)
        body |= {name: plain[name] for name in _SHOWN}
        if found is not None:
            read, written = self._ask.num_prompt_tokens, len(found.tokens)
            body["system_fingerprint"] = self._backend.facts.fingerprint(found.step)
            body["usage"] = {
                "input_tokens": read,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": written,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": read + written,
            }
        return body


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the current state of an item."""
    parts = item.get("content")
    return {**item, "content": [dict(each) for each in parts]} if parts is not None else dict(item)
