"""Conversations of files as tokens, with the weight of the loss of each token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from mt_tokenizer import (
    ChatError,
    ChatTemplate,
    Rendered,
    Tokenizer,
    TokenizerError,
    with_parsed_arguments,
)

from mt_data.documents.conversations import Conversation, parse_conversation
from mt_data.error import DataFileError, one_of

TooLong: TypeAlias = Literal["refuse", "drop", "cut"]


@dataclass(kw_only=True)
class ChatReport:
    """Counts of files of conversations.

    Attributes:
        conversations: Number of conversations with labels.
        tokens: Number of their tokens.
        labels: Number of learnt tokens.
        lengths: Number of tokens of each conversation with labels.
        cut: Number of conversations cut to a row.
        too_long: Number of conversations left out because they are longer than a row.
        unlabelled: Number of conversations left out because they have no labels.
        is_weighted: Whether some tokens have a weight other than 1.
    """

    conversations: int = 0
    tokens: int = 0
    labels: int = 0
    lengths: list[int] = field(default_factory=list)
    cut: int = 0
    too_long: int = 0
    unlabelled: int = 0
    is_weighted: bool = False


class ChatReader:
    """Conversations of files as tokens, with the weight of the loss of each token.

    Args:
        tokenizer: The tokenizer.
        template: Chat template with this tokenizer; None takes only texts with `prompt` and
            `completion`.
        size: Number of input tokens in a row, one less than the tokens of the longest conversation;
            None for any.
        too_long: Treatment of longer conversations.

    Attributes:
        report: Counts so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        size: int | None = None,
        too_long: TooLong = "refuse",
    ) -> None:
        one_of(TooLong, too_long=too_long)
        self.tokenizer, self.template = tokenizer, template
        self.report = ChatReport()
        self._size, self._too_long = size, too_long

    def read(
        self,
        lines: Iterable[tuple[str, bytes]],
        on_error: Callable[[DataFileError], None] | None = None,
    ) -> Iterator[Rendered]:
        """Yield the conversations with something to learn.

        Args:
            lines: Place and content of each line.
            on_error: Function to call with the error of a line, which is left out; None raises it.

        Raises:
            DataFileError: A line is no conversation, the template refuses it, or it is too long.
        """
        for where, line in lines:
            try:
                found = self.fitting(where, self.rendered(parse_conversation(where, line)))
            except DataFileError as error:
                if on_error is None:
                    raise
                on_error(error)
                continue
            if found is not None:
                yield found

    def rendered(self, talk: Conversation) -> Rendered:
        """Return the tokens of a conversation with the weights of their losses.

        Raises:
            DataFileError: There is no template, or it refuses the messages.
        """
        try:
            if not talk.messages:
                return self._continued(talk)
            if self.template is None:
                raise ChatError("messages need a chat template; name one, or give texts")
            messages = with_parsed_arguments(talk.messages)
            return self.template.render(messages, tools=talk.tools)
        except TokenizerError as error:
            raise DataFileError(talk.where, str(error)) from None

    def _continued(self, talk: Conversation) -> Rendered:
        """Return a prompt, tokenized as in inference, with its completion."""
        tokenizer = self.tokenizer
        begin = tokenizer.encode_prompt("")
        begin = begin[:-1] if begin[-1:] == [tokenizer.eod_id] else begin
        prompt, both = tokenizer.encode_batch([talk.prompt, talk.prompt + talk.completion])
        rest = both[len(prompt) :]
        if both[: len(prompt)] != prompt:  # a token would span prompt and completion
            rest = tokenizer.encode(talk.completion)
        asked, answer = [*begin, *prompt], [*rest, tokenizer.eod_id]
        return Rendered([*asked, *answer], [0.0] * len(asked) + [1.0] * len(answer))

    def fitting(self, where: str, found: Rendered) -> Rendered | None:
        """Return a conversation that fits a row, or None to leave it out, and count it.

        Raises:
            DataFileError: The conversation is too long, and `too_long` is `refuse`.
        """
        report, size = self.report, self._size
        if size is not None and len(found.ids) - 1 > size:
            if self._too_long == "refuse":
                raise DataFileError(
                    where,
                    f"has {len(found.ids)} tokens, and a row takes {size + 1}; use longer rows, or "
                    "leave such conversations out or cut them (too_long: drop or cut)",
                )
            if self._too_long == "drop":
                report.too_long += 1
                return None
            report.cut += 1
            found = Rendered(found.ids[: size + 1], found.trained[: size + 1])
        labels = sum(weight > 0 for weight in found.trained[1:])
        if not labels:
            report.unlabelled += 1
            return None
        report.conversations += 1
        report.tokens += len(found.ids)
        report.labels += labels
        report.lengths.append(len(found.ids))
        report.is_weighted |= any(weight not in (0, 1) for weight in found.trained)
        return found
