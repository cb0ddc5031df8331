"""Records of conversations: `messages`, `prompt` with `completion`, ShareGPT's `conversations`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mt_files import FileError, listed, parse_json, shorten

from mt_data.documents.reader import numbered_lines
from mt_data.documents.source import decompressed, find_files
from mt_data.error import DataFileError

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


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One record to learn.

    Attributes:
        where: The file and the line.
        messages: Messages for a chat template; empty for a text to continue.
        tools: JSON schemas of functions, if the record has some.
        prompt: The text before what is learnt.
        completion: The text that is learnt.
    """

    where: str
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] | None = field(default=None)
    prompt: str = ""
    completion: str = ""


def read_lines(path: str | os.PathLike[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the place, such as `talks.jsonl:7`, and the content of each line of JSON lines.

    A file may be compressed; of a folder all `.jsonl` files are read.

    Raises:
        DataFileError: A file can't be read, or a line is too long.
    """
    for source in find_files(path, "**/*.jsonl*"):
        with source.open() as file, decompressed(file, source.name) as content:
            for number, line in numbered_lines(content, source.name):
                yield f"{source.name}:{number}", line


def parse_conversation(where: str, line: bytes) -> Conversation:
    """Return the conversation of a line.

    Raises:
        DataFileError: The line is no JSON object, or none of a known form.
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
