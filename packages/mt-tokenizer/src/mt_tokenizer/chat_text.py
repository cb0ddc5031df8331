"""The text of a conversation, and the places in it that only spell the name of a special token."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from re import Pattern
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ChatText:
    """The output of a chat template, for `Tokenizer.encode_chat`.

    Attributes:
        text: The text.
        literal: Places of characters that came from the messages. A name of a special token with
            one of them is plain text; the template wrote the others.
        spans: Parts [begin, end) that the template marks with `{% generation %}`.
    """

    text: str
    literal: frozenset[int] = frozenset()
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Tokens with the part of the text that each stands for.

    Attributes:
        ids: Ids of the tokens.
        begins: Place in the text where each begins.
        ends: Place after its last character.
    """

    ids: list[int]
    begins: list[int]
    ends: list[int]


def pattern_of(names: Iterable[str]) -> Pattern[str]:
    """Return a regular expression of names, of which the longest is found first."""
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def rename_tokens(record: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of a tokenizer.json with other names of tokens and no post-processor."""
    model = dict(record["model"])
    vocab = model["vocab"]
    if isinstance(vocab, list):
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    else:
        model["vocab"] = {names.get(token, token): number for token, number in vocab.items()}
    if isinstance(unknown := model.get("unk_token"), str):
        model["unk_token"] = names.get(unknown, unknown)
    added = record["added_tokens"]
    added = [{**each, "content": names.get(each["content"], each["content"])} for each in added]
    return {**record, "model": model, "added_tokens": added, "post_processor": None}


def renamed(
    chat: ChatText, pattern: Pattern[str], names: Mapping[str, str]
) -> tuple[str, list[int], list[int]]:
    """Return a text in which the special tokens that the template wrote have other names.

    Args:
        chat: The text.
        pattern: Regular expression of the names.
        names: New name of each.

    Returns:
        The text, and for each of its characters the begin and the end of what it stands for in the
        text before.
    """
    parts, begins, ends = [], [], []

    def keep(begin: int, end: int) -> None:
        parts.append(chat.text[begin:end])
        begins.extend(range(begin, end))
        ends.extend(range(begin + 1, end + 1))

    at = 0
    for begin, end in written(chat, pattern):
        keep(at, begin)
        name = names[chat.text[begin:end]]
        parts.append(name)
        begins.extend([begin] * len(name))
        ends.extend([end] * len(name))
        at = end
    keep(at, len(chat.text))
    return "".join(parts), begins, ends


def written(chat: ChatText, pattern: Pattern[str]) -> Iterable[tuple[int, int]]:
    """Yield the places [begin, end) of special tokens that the template wrote."""
    at = 0
    while found := pattern.search(chat.text, at):
        begin, end = found.span()
        if chat.literal.isdisjoint(range(begin, end)):
            yield begin, end
            at = end
        else:
            at = begin + 1


def by_parts(
    chat: ChatText,
    pattern: Pattern[str],
    special: Mapping[str, int],
    encode: Callable[[str], tuple[list[int], list[int], list[int]]],
) -> Encoded:
    """Encode a text for a library that knows no special tokens: the parts between them alone."""
    encoded = Encoded(ids=[], begins=[], ends=[])

    def add(begin: int, end: int) -> None:
        ids, begins, ends = encode(chat.text[begin:end])
        encoded.ids.extend(ids)
        encoded.begins.extend(begin + place for place in begins)
        encoded.ends.extend(begin + place for place in ends)

    at = 0
    for begin, end in written(chat, pattern):
        add(at, begin)
        encoded.ids.append(special[chat.text[begin:end]])
        encoded.begins.append(begin)
        encoded.ends.append(end)
        at = end
    add(at, len(chat.text))
    return encoded
