"""A program that renders a chat template: a model's folder brings it, so it is untrusted code.

`ChatTemplate` runs this module in a process of its own. A message is its length (8 bytes) and JSON:
first the template with its limits, then conversations; each is answered. For a conversation
several texts may be asked for: of its first messages, with or without the prompt for an answer.
"""

from __future__ import annotations

import json
import resource
import struct
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any, BinaryIO

_HEAD = struct.Struct("<Q")
_LONGEST_REASON = 500
_NONE = "None"


def send(file: BinaryIO, message: Any) -> None:
    """Write a message."""
    content = json.dumps(message).encode()
    file.write(_HEAD.pack(len(content)) + content)
    file.flush()


def receive(file: BinaryIO) -> Any:
    """Read a message.

    Raises:
        EOFError: The other side has ended.
    """
    head = file.read(_HEAD.size)
    content = file.read(*_HEAD.unpack(head)) if len(head) == _HEAD.size else b""
    if not content:
        raise EOFError
    return json.loads(content)


def main() -> None:
    """Render texts for standard input until it ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    given = receive(source)
    span = ["", ""]
    environment = _environment(span)
    _limit(resource.RLIMIT_AS, given["memory_bytes"])
    _limit(resource.RLIMIT_FSIZE, 0)
    template = problem = None
    try:
        template = environment.from_string(given["template"])
    except Exception as error:  # noqa: BLE001 - a template may make the compiler raise anything
        problem = _reason(error)
    send(sink, {"error": problem} if problem else {})
    while template is not None:
        try:
            asked = receive(source)
        except EOFError:
            return
        span[:] = asked["span"]
        used = resource.getrusage(resource.RUSAGE_SELF)
        spent = int(used.ru_utime + used.ru_stime) + 1
        _limit(resource.RLIMIT_CPU, spent + given["cpu_seconds"])  # ends this process
        send(sink, _answer(template, asked, given["characters"]))


def _answer(template: Any, asked: dict[str, Any], most: int) -> dict[str, Any]:
    """Return the texts of a conversation, or why there is none and the number of that text."""
    made: dict[tuple[int, bool], str] = {}
    for number, (count, has_prompt) in enumerate(asked["texts"]):
        if (count, has_prompt) in made:
            continue
        variables = {**asked["variables"], "add_generation_prompt": has_prompt}
        try:
            text = _rendered(template, asked["messages"][:count], variables, most)
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            return {"error": _reason(error), "number": number}
        made[count, has_prompt] = text
    return {"texts": [made[count, has_prompt] for count, has_prompt in asked["texts"]]}


def _rendered(template: Any, messages: list[Any], variables: dict[str, Any], most: int) -> str:
    """Return a text; where a message has no content, "None" is not written for it.

    Some templates ask whether the content is none, others fail at it or write "None". So the text
    with an empty content is taken if the other one is the same but for that word.
    """
    without = [n for n, each in enumerate(messages) if each.get("content") is None]
    if not without:
        return _text(template.generate(variables | {"messages": messages}), most)
    filled = [{**each, "content": ""} if n in without else each for n, each in enumerate(messages)]
    found: list[str] = []
    reasons: list[Exception] = []
    for each in (messages, filled):
        try:
            found.append(_text(template.generate(variables | {"messages": each}), most))
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            reasons.append(error)
    if not found:
        raise reasons[0]
    as_none, as_empty = found[0], found[-1]
    words = as_none.count(_NONE) - as_empty.count(_NONE)
    return as_empty if len(as_none) == len(as_empty) + words * len(_NONE) else as_none


def _environment(span: list[str]) -> Any:
    """Return the sandbox, with what templates of Hugging Face expect of it.

    Args:
        span: Characters to write before and behind what the assistant says.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag `{% generation %}`, which marks what the assistant says."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

        def _said(self, caller: Callable[[], str]) -> str:
            return span[0] + caller() + span[1]

    def refuse(message: object) -> None:
        raise TemplateError(str(message))

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": _now}
    return environment


def _text(parts: Any, most: int) -> str:
    found, length = [], 0
    for part in parts:
        length += len(part)
        if length > most:
            raise ValueError(f"it writes more than {most} characters")
        found.append(part)
    return "".join(found)


def _limit(which: int, value: int) -> None:
    resource.setrlimit(which, (value, resource.getrlimit(which)[1]))


def _reason(error: BaseException) -> str:
    name = type(error).__name__
    text = str(error)[:_LONGEST_REASON]
    return text if name == "TemplateError" and text else f"{name}: {text}" if text else name


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates give it by place
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    how: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)


if __name__ == "__main__":
    main()
