"""A program that renders a chat template: a model's folder brings it, so it is untrusted code.

`ChatTemplate` runs this module in a process of its own. A message is its length (8 bytes) and JSON:
first the template with its limits, then the variables of each text; each is answered.
"""

from __future__ import annotations

import json
import resource
import struct
import sys
from datetime import datetime
from typing import Any, BinaryIO

_HEAD = struct.Struct("<Q")
_LONGEST_REASON = 500


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
    environment = _environment()
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
            variables = receive(source)
        except EOFError:
            return
        used = resource.getrusage(resource.RUSAGE_SELF)
        spent = int(used.ru_utime + used.ru_stime) + 1
        _limit(resource.RLIMIT_CPU, spent + given["cpu_seconds"])  # ends this process
        try:
            answer = {"text": _text(template.generate(variables), given["characters"])}
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            answer = {"error": _reason(error)}
        send(sink, answer)


def _environment() -> Any:
    """Return the sandbox, with what templates of Hugging Face expect of it."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag `{% generation %}`, which marks what the assistant says."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

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
