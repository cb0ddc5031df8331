"""Calls of functions: the grammar of answers that are calls, and the parser of answers."""

from __future__ import annotations

import json
from collections.abc import Iterable

from mt_tokenizer import AnswerEvent, AnswerForm, AnswerParser, CallArguments, CallBegin, CallEnd

from mt_infer.forms.chat import ChatForm

# The form of the calls: {"name": ..., "parameters": {...}}; {...}
_ASKED = AnswerForm(calls="llama3")


def call_grammar(form: ChatForm) -> str:
    """Return a grammar of llguidance for an answer that consists of function calls."""
    functions = [each.function for each in form.callable]
    names = [f"call_{number}" for number in range(len(functions))]
    rest = ' ("; " call)*' if form.parallel_tool_calls else ""
    lines = [f"start: call{rest}", f"call: {' | '.join(names)}"]
    for name, function in zip(names, functions, strict=True):
        head = json.dumps(f'{{"name": {json.dumps(function.name)}, "parameters": ')
        lines.append(f'{name}: {head} {name}_values "}}"')
        lines.append(f"{name}_values: %json {json.dumps(_object(function.parameters))}")
    return "\n".join(lines)


def parser_of(form: AnswerForm, chat: ChatForm, prompt: str) -> AnswerParser:
    """Return the parser of an answer's parts.

    Args:
        form: The model's marks of the parts of its answers.
        chat: The fields of the request.
        prompt: The rendered prompt.
    """
    names = [each.function.name for each in chat.callable]
    if chat.must_call:
        return AnswerParser(_ASKED, functions=names)
    return AnswerParser(form, functions=names, prompt=prompt)


def asked_calls(events: Iterable[AnswerEvent], form: ChatForm) -> Iterable[AnswerEvent]:
    """Yield events; if only one call is wanted, leave out further ones."""
    for event in events:
        is_call = isinstance(event, CallBegin | CallArguments | CallEnd)
        if not is_call or form.parallel_tool_calls or event.index == 0:
            yield event


def _object(schema: object) -> dict[str, object]:
    """Return a schema of arguments that allows only objects."""
    return {"type": "object", **(schema if isinstance(schema, dict) else {})}
