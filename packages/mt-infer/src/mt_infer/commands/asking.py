"""The input of `mt-infer generate`: a text, a conversation, or a file with lines of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from mt_files import FileError, open_file, parse_json, require, shorten
from mt_tokenizer import ChatTemplate, TokenizerError, with_parsed_arguments

from mt_infer.loading import Run
from mt_infer.text import PromptError, check_prompt, encode_prompt

MAX_PROMPT_BYTES = 1 << 24
_BOM = b"\xef\xbb\xbf"
_FORMS = 'write {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'


@dataclass(frozen=True, kw_only=True)
class Question:
    """A line of a file of prompts.

    Attributes:
        line: Number of the line, from 1.
        tokens: Tokens of the prompt.
    """

    line: int
    tokens: array[int]


class Asker:
    """A maker of tokens from texts and conversations; the chat template is opened once.

    Args:
        run: The model.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._template: ChatTemplate | None = None

    def close(self) -> None:
        """Close the chat template."""
        if self._template is not None:
            self._template.close()

    def of_talk(
        self, messages: Sequence[Any], tools: Sequence[Any] | None = None
    ) -> tuple[list[int], list[str | None]]:
        """Return the tokens of a conversation for the model to answer, and its images.

        Returns:
            The tokens, and for each image the name in its part, or None.

        Raises:
            ChatError: There is no chat template, or it refuses the messages.
        """
        run, named = self._run, list[str | None]()
        if self._template is None:
            self._template = ChatTemplate.from_folder(run.chat_folder, run.tokenizer)
        if run.config.images is not None:  # `<image>` in a text is an image, as in training rows
            multimodal = require("mt_multimodal", "a conversation with a model that takes images")
            messages, named = multimodal.with_parts(messages)
        written = self._template.write(with_parsed_arguments(messages), tools=tools)
        return run.tokenizer.encode_chat(written), named

    def of_line(self, content: bytes, where: str, *, system: str | None, chat: bool) -> list[int]:
        """Return the tokens of a line of a file of prompts.

        Args:
            content: The line.
            where: Place of the line, for messages.
            system: System message before a prompt as a user's message.
            chat: Whether a prompt is a user's message.

        Raises:
            PromptError: The line is no prompt, or the model can't answer it.
        """
        try:
            asked, tools = _asked(content, where)
            if isinstance(asked, str) and not chat:
                return encode_prompt(asked, self._run.tokenizer, self._run.config)
            asked = user_says(asked, system) if isinstance(asked, str) else asked
            tokens, _ = self.of_talk(asked, tools)
            check_prompt(tokens, self._run.config)
        except (FileError, PromptError, TokenizerError) as error:
            text = str(error)
            raise PromptError(text if text.startswith(where) else f"{where}: {text}") from None
        return tokens


def _asked(content: bytes, where: str) -> tuple[str | list[Any], list[Any] | None]:
    """Return the text or the messages of a line, and its tools."""
    record = parse_json(content, name=where)
    if not isinstance(record, dict) or not {"prompt", "messages"} & record.keys():
        raise FileError(where, f"is {shorten(record)}; {_FORMS}")
    if isinstance(record.get("prompt"), str) and "messages" not in record:
        return record["prompt"], None
    asked = record.get("messages", record.get("prompt"))
    return checked_talk({"messages": asked, "tools": record.get("tools")}, where)


def user_says(text: str, system: str | None) -> list[dict[str, str]]:
    """Return the conversation that begins with a user's message."""
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": text}]


def checked_talk(record: Mapping[str, Any], where: str) -> tuple[list[Any], list[Any] | None]:
    """Return the messages and the tools of a record.

    Raises:
        FileError: The messages or tools are no lists of objects.
    """
    messages, tools = record.get("messages"), record.get("tools")
    for name, value in (("messages", messages), ("tools", [] if tools is None else tools)):
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            text = f'{name} are no list of objects; write [{{"role": "user", "content": ...}}]'
            raise FileError(where, text)
    return cast("list[Any]", messages), tools


def read_questions(path: Path, run: Run, *, chat: bool, system: str | None) -> list[Question]:
    """Return the lines of a file of prompts, after a check that the model can answer each.

    A line is a JSON object with `prompt`, a text or a list of messages, or with `messages` and
    `tools`; other keys are ignored, and so are blank lines.

    Args:
        path: The file.
        run: The model.
        chat: Whether a prompt is a user's message.
        system: System message before a prompt.

    Raises:
        FileError: The file can't be read.
        PromptError: A line is no prompt, or the model can't answer it.
    """
    found: list[Question] = []
    with closing(Asker(run)) as asker, open_file(path) as file:
        for line, content in _lines(file, path):
            tokens = asker.of_line(content, f"{path}:{line}", system=system, chat=chat)
            found.append(Question(line=line, tokens=array("q", tokens)))
    if not found:
        raise PromptError(f"{path} has no prompts; {_FORMS} in each line")
    return found


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    while content := file.readline(MAX_PROMPT_BYTES + 1):
        number += 1
        if len(content) > MAX_PROMPT_BYTES:
            raise PromptError(f"{path}:{number}: is longer than {MAX_PROMPT_BYTES} bytes; cut it")
        content = content.removeprefix(_BOM) if number == 1 else content
        if content.strip():
            yield number, content
