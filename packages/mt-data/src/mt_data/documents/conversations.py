"""Records of conversations: `messages`, `prompt` with `completion`, ShareGPT's `conversations`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mt_files import FileError, listed, parse_json, shorten

from mt_data.documents.records import format_of, read_records
from mt_data.documents.source import decompressed, find_files
from mt_data.error import DataFileError

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

# ShareGPT's names of roles.
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "observation": "tool",
    "function_response": "tool",
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
}
_FORMS = "messages; prompt and completion; or conversations"
_COLUMNS = ("messages", "tools", "prompt", "completion", "conversations", "system")
_IN_FOLDERS = ("jsonl", "parquet", "arrow")


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One record to learn.

    Attributes:
        where: The file and the line.
        messages: Messages for a chat template; empty for a text to continue.
        tools: JSON schemas of functions, if the record has some.
        prompt: The text before the completion, without a loss.
        completion: The text to learn.
    """

    where: str
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] | None = field(default=None)
    prompt: str = ""
    completion: str = ""


def read_lines(path: str | os.PathLike[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the place, such as `talks.jsonl:7`, and the content of each record as a line of JSON.

    A file with an unknown ending has JSON lines. All JSON lines, parquet and Arrow files of a
    folder are read. A null in a row counts as an absent key, except as the content of a message.

    Raises:
        DataFileError: A file can't be read, or a line is too long.
    """
    files = find_files(path, "**/*")
    for source in [file for file in files if format_of(file) in _IN_FOLDERS] or files:
        kind = format_of(source)
        with source.open() as file, decompressed(file, source.name) as content:
            kind = "jsonl" if kind == "text" else kind
            for number, record in read_records(content, source, kind, columns=_COLUMNS):
                where = f"{source.name}:{number}"
                yield where, record if isinstance(record, bytes) else _as_line(where, record)


def digested_lines(
    sources: Iterable[str | os.PathLike[str]], digest: Hash
) -> Iterator[tuple[str, bytes]]:
    """Yield the records of several files as `read_lines` does, and update a digest with them."""
    for source in sources:
        for where, line in read_lines(source):
            digest.update(line + b"\n")
            yield where, line


def _as_line(where: str, record: object) -> bytes:
    try:
        return json.dumps(_without_nulls(record)).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataFileError(where, f"has a value that is not JSON: {error}") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        given = ((key, each) for key, each in value.items() if each is not None or key == "content")
        return {key: _without_nulls(each) for key, each in given}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def parse_conversation(where: str, line: bytes) -> Conversation:
    """Return the conversation of a line.

    Raises:
        DataFileError: The line is no JSON object, or has no known form.
    """
    try:
        record = parse_json(line, name=where)
    except FileError as error:
        raise DataFileError(where, error.problem) from None
    if not isinstance(record, dict):
        raise DataFileError(where, f"is {type(record).__name__}, not a JSON object with {_FORMS}")
    tools = record.get("tools")
    if tools is not None and not _are_mappings(tools):
        raise DataFileError(where, f"tools is {shorten(tools)}; give a list of objects")
    if "messages" in record:
        return _of_messages(where, record["messages"], "messages", tools)
    if "prompt" in record and "completion" in record:
        return _of_completion(where, record["prompt"], record["completion"], tools)
    if "conversations" in record:
        return _of_sharegpt(where, record, tools)
    keys = listed(sorted(map(str, record))) or "no keys"
    raise DataFileError(where, f"has {keys}; a line has {_FORMS}")


def _of_messages(where: str, messages: Any, name: str, tools: Any) -> Conversation:
    if not _are_mappings(messages) or not messages:
        text = f"{name} is {shorten(messages)}; give a list of objects with role and content"
        raise DataFileError(where, text)
    return Conversation(where=where, messages=messages, tools=tools or None)


def _of_completion(where: str, prompt: Any, completion: Any, tools: Any) -> Conversation:
    if isinstance(prompt, list) and isinstance(completion, list):
        given = [{**each, "train": False} for each in prompt if isinstance(each, dict)]
        whole = given if len(given) == len(prompt) else prompt
        return _of_messages(where, [*whole, *completion], "prompt with completion", tools)
    if not isinstance(prompt, str) or not isinstance(completion, str) or not completion:
        raise DataFileError(
            where, "prompt and completion must both be texts, or both lists of messages"
        )
    return Conversation(where=where, prompt=prompt, completion=completion)


def _of_sharegpt(where: str, record: Mapping[str, Any], tools: Any) -> Conversation:
    turns = record["conversations"]
    if not _are_mappings(turns):
        text = f"conversations is {shorten(turns)}; give a list of objects with from and value"
        raise DataFileError(where, text)
    messages = []
    if isinstance(system := record.get("system"), str) and system:
        messages.append({"role": "system", "content": system})
    for number, turn in enumerate(turns):
        role = _ROLES.get(str(turn.get("from", turn.get("role"))))
        if role is None:
            text = f"turn {number} is from {shorten(turn.get('from'))}; known are {listed(_ROLES)}"
            raise DataFileError(where, text)
        kept = {key: turn[key] for key in turn if key not in ("from", "value", "role")}
        messages.append({"role": role, "content": turn.get("value", turn.get("content")), **kept})
    return _of_messages(where, messages, "conversations", tools)


def _are_mappings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)
