"""Request bodies as frozen dataclasses, without JSON that readers interpret differently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from mt_files import FileError, bind, parse_json, shorten

from mt_infer.forms.refusal import FormError

_INTEGERS = range(-(2**63), 2**63)
_SHOWN_STEPS = 8
# Schemas of others, in which a null may say something.
_FREE = frozenset({"parameters", "schema", "chat_template_kwargs", "arguments"})
_IGNORED = frozenset(
    {
        "user",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
)


@dataclass(frozen=True, kw_only=True)
class Form:
    """The fields of a route's body.

    Attributes:
        NOT_SERVED: Refused fields of OpenAI's, with the reasons.
    """

    NOT_SERVED: ClassVar[Mapping[str, str]] = {}


T = TypeVar("T", bound=Form)


def read_form(cls: type[T], content: bytes, max_depth: int = 64) -> T:
    """Return the dataclass of a body.

    Nulls count as absent, and fields that can't change an answer are ignored.

    Args:
        cls: The dataclass.
        content: The body.
        max_depth: Deepest nesting of lists and mappings.

    Raises:
        FormError: The body is no JSON, is nested too deeply, or a field is unknown, not served,
            or has a wrong value.
    """
    given = _without_nulls(_parsed(content, max_depth))
    for name in _IGNORED & given.keys():
        del given[name]
    for name in given.keys() & cls.NOT_SERVED.keys():
        reason = cls.NOT_SERVED[name]
        text = f"is a field of OpenAI's that is not served here; {reason}"
        raise FormError(name, text, code="unsupported_parameter")
    bound = bind(cls, given)
    if bound.value is None:
        path, text, _ = bound.problems[0]
        code = "unknown_parameter" if text.startswith("unknown key") else "invalid_value"
        raise FormError(path, text, code=code)
    return bound.value


def _parsed(content: bytes, max_depth: int) -> dict[str, Any]:
    try:
        value = parse_json(content, name="the body")
    except FileError as error:
        raise FormError("", f"the body {error.problem}", code="invalid_json") from None
    _check(value, max_depth)
    if not isinstance(value, dict):
        text = f"the body is {shorten(value)}; send a JSON object of the fields"
        raise FormError("", text, code="invalid_json")
    return value


def _check(value: Any, max_depth: int) -> None:
    """Refuse deep nesting, integers beyond 64 bits and lone surrogates anywhere."""
    path: list[str | int] = []
    problem = _problem(value, path, max_depth)
    if problem is not None:
        steps = (f"[{each}]" if isinstance(each, int) else f".{each}" for each in path)
        where = "".join(steps).removeprefix(".")
        if len(path) > _SHOWN_STEPS:
            where = ""
        raise FormError(where, problem)


def _problem(value: Any, path: list[str | int], max_depth: int) -> str | None:
    """Return the first problem of a value, and make `path` lead to it."""
    if len(path) > max_depth:
        return f"the body is nested deeper than {max_depth} levels"
    if isinstance(value, str):
        return _surrogate(value)
    if isinstance(value, int):
        return None if value in _INTEGERS else f"{shorten(value)} does not fit 64 bits"
    if not isinstance(value, dict | list):
        return None
    are_tokens = isinstance(value, list) and set(map(type, value)) == {int}
    if are_tokens and min(value) in _INTEGERS and max(value) in _INTEGERS:
        return None  # quickly, because they are many
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        path.append(key)
        found = _problem(inner, path, max_depth) or (
            _surrogate(key) if isinstance(key, str) else None
        )
        if found is not None:
            return found
        path.pop()
    return None


def _surrogate(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"has a lone surrogate at character {error.start}, which is no character; replace it"
    return None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        items = ((key, each) for key, each in value.items() if each is not None)
        return {key: each if key in _FREE else _without_nulls(each) for key, each in items}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
