"""Which tokens of a conversation are learnt: the assistant's turns."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mt_tokenizer.chat_text import ChatText, Encoded
from mt_tokenizer.error import TokenizerError
from mt_tokenizer.tokenizer import Tokenizer

ASSISTANT = "assistant"
# What a prompt supplies where the assistant is not to think.
_NO_THOUGHT = re.compile(r"\s*(?:<think>\s*</think>|\[THINK\]\s*\[/THINK\])\s*")
_OF_TRAINING = ("train", "weight")


class ChatError(TokenizerError):
    """A chat template does not render messages; the message has its reason."""


class Rendered(NamedTuple):
    """A conversation as a model learns it.

    Attributes:
        ids: Its tokens.
        trained: Weight of the loss of each token: 0 where nothing is learnt.
    """

    ids: list[int]
    trained: list[float]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A part of a conversation's text by the assistant.

    Attributes:
        message: Number of the message.
        weight: Weight of its loss.
        begin: Place where the turn begins, after the text that a prompt supplies.
        end: Place where the turn ends, or where the template's text after it may begin.
        closed: Last place for a token that ends the turn.
    """

    message: int
    weight: float
    begin: int
    end: int
    closed: int


def split_training(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], dict[int, float]]:
    """Return the messages for a template, and the weight of each of the assistant's by number.

    A message with `train: false` has the weight 0, one with `weight` that weight, others 1.

    Raises:
        ChatError: A message is no mapping with a role, or has other settings.
    """
    plain: list[dict[str, Any]] = []
    weights: dict[int, float] = {}
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatError(f"message {number} is no mapping with a role; give role and content")
        plain.append({key: item for key, item in message.items() if key not in _OF_TRAINING})
        weight = _weight_of(message, number)
        if message["role"] == ASSISTANT:
            weights[number] = weight
        elif any(message.get(name) for name in _OF_TRAINING):
            raise ChatError(
                f"message {number} is of the role {message['role']!r} and is to be learnt; only "
                f"messages of the role {ASSISTANT!r} are, so remove train and weight"
            )
    return plain, weights


def _weight_of(message: Mapping[str, Any], number: int) -> float:
    train, weight = message.get("train"), message.get("weight")
    if train is not None and not isinstance(train, bool):
        raise ChatError(f"message {number} has train: {train!r}; use true or false")
    if weight is None:
        return float(train is not False)
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not 0 <= weight < math.inf:
        raise ChatError(f"message {number} has weight: {weight!r}; use a number of 0 or more")
    return 0.0 if train is False else float(weight)


def turns_by_prefix(
    whole: ChatText, found: Mapping[int, tuple[ChatText, ChatText]], weights: Mapping[int, float]
) -> list[Turn]:
    """Return the turns of the assistant in a text, by the texts of the conversation's beginnings.

    Args:
        whole: The whole conversation.
        found: For each message, the text of those before it with the prompt for an answer, and the
            text up to its end.
        weights: Weight of each message.

    Raises:
        ChatError: A text is no beginning of the whole.
    """
    turns: list[Turn] = []
    for number, (before, after) in found.items():
        for text, what in ((before, "before"), (after, "of")):
            if not whole.text.startswith(text.text):
                raise ChatError(
                    f"message {number}: what the chat template writes {what} it is not the same in "
                    "the whole conversation, so the part to learn is not known; use a template with"
                    " {% generation %} around what the assistant says, train conversations that "
                    "end with this message, or give it train: false"
                )
        begin, end = len(before.text), len(after.text)
        if end <= begin:
            raise ChatError(f"message {number}: the chat template writes nothing of it")
        turns.append(Turn(message=number, weight=weights[number], begin=begin, end=end, closed=end))
    return turns


def turns_by_tag(
    whole: ChatText, found: Mapping[int, ChatText], weights: Mapping[int, float]
) -> list[Turn]:
    """Return the parts of a text that the template marks with `{% generation %}`.

    Args:
        whole: The whole conversation.
        found: For each message of the assistant, the text of the conversation up to its end.
        weights: Weight of each.

    Raises:
        ChatError: A message to learn has no part.
    """
    turns: list[Turn] = []
    done = 0
    for number, until in found.items():
        spans = whole.spans[done : len(until.spans)]
        if not spans and weights[number]:
            raise ChatError(
                f"message {number}: the chat template has no "
                "{% generation %} around it, so nothing of it would be learnt; put the tag around "
                "all that the assistant says, calls of functions too, or give it train: false"
            )
        for begin, end in spans:
            closing = until.text[until.spans[-1][1] :] if end == spans[-1][1] else ""
            behind = whole.text[end : end + len(closing)]
            closed = end + next(
                (
                    at
                    for at, pair in enumerate(zip(closing, behind, strict=False))
                    if len({*pair}) > 1
                ),
                min(len(closing), len(behind)),
            )
            turns.append(
                Turn(message=number, weight=weights[number], begin=begin, end=end, closed=closed)
            )
        done = max(done, len(until.spans))
    return [turn for turn in turns if turn.weight]


def trained_of(
    tokenizer: Tokenizer, text: str, encoded: Encoded, turns: Sequence[Turn]
) -> list[float]:
    """Return the weight of the loss of each token.

    Args:
        tokenizer: The tokenizer.
        text: The text of the conversation.
        encoded: Its tokens.
        turns: The turns to learn.

    Raises:
        ChatError: A token belongs both to a turn and to the text beside it.
    """
    # The token of unknown text is special, too, and stands for no name.
    special = tokenizer.special_tokens
    places = zip(encoded.ids, encoded.begins, encoded.ends, strict=True)
    is_special = [special.get(text[begin:end].strip()) == n for n, begin, end in places]
    trained = [0.0] * len(encoded.ids)
    for turn in turns:
        begin = turn.begin
        if thought := _NO_THOUGHT.match(text, begin, turn.end):
            begin = thought.end()
        first, stop = _tokens_in(text, encoded, turn, begin)
        last = max((n for n in range(first, stop) if is_special[n]), default=None)
        if last is not None and _is_space(text, encoded.ends[last], turn.end):
            stop = last + 1  # the line end behind the token that ends the turn
        else:
            stop = _with_end(text, encoded, turn, stop, is_special)
        trained[first:stop] = [turn.weight] * (stop - first)
    return trained


def _tokens_in(text: str, encoded: Encoded, turn: Turn, begin: int) -> tuple[int, int]:
    """Return the range of the tokens of a turn."""
    for edge in (turn.begin, turn.end):
        before = bisect_left(encoded.begins, edge) - 1
        if before >= 0 and not _is_space(text, edge, encoded.ends[before]):
            token = text[encoded.begins[before] : encoded.ends[before]]
            raise ChatError(
                f"message {turn.message}: the token {token!r} belongs to the answer and to the "
                "text beside it; let the template end with a special token or a line end there, "
                "and write no space before the answer"
            )
    return bisect_left(encoded.begins, begin), bisect_left(encoded.begins, turn.end)


def _with_end(
    text: str, encoded: Encoded, turn: Turn, stop: int, is_special: Sequence[bool]
) -> int:
    """Return the end of a turn's tokens with the special token that the template writes behind."""
    for n in range(stop, len(encoded.ids)):
        if encoded.ends[n] > turn.closed:
            break
        if is_special[n]:
            return n + 1
        if not _is_space(text, encoded.begins[n], encoded.ends[n]):
            break
    return stop


def _is_space(text: str, begin: int, end: int) -> bool:
    return not text[begin:end].strip()
