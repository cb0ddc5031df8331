"""Chat templates: messages to the text that a model was trained to continue."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

from mt_files import Checks, FileError, parse_json, read_json, read_text, require, shorten

from mt_tokenizer.chat_text import ChatText
from mt_tokenizer.literal import Literals, free_marks, restore
from mt_tokenizer.tokenizer import Tokenizer
from mt_tokenizer.turns import (
    ChatError,
    Rendered,
    split_training,
    trained_of,
    turns_by_prefix,
    turns_by_tag,
)

_MOST_BYTES = 1 << 22
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names that templates read
_UNFIT = "the chat template can't render these messages"
_ENDED = 2.0  # seconds
_PROBE = "mt probes this"


@dataclass(frozen=True, kw_only=True)
class ChatLimits:
    """Limits of a chat template for a conversation.

    Attributes:
        cpu_seconds: Seconds of a processor.
        memory_bytes: Memory of its process, of which Python takes about 50 MB.
        characters: Length of the text.
    """

    cpu_seconds: int = 2
    memory_bytes: int = 1 << 29
    characters: int = 1 << 22

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "cpu_seconds", "memory_bytes", "characters")
        checks.done()


def with_parsed_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages in which the arguments of calls are objects, as chat templates expect them.

    OpenAI's clients send the arguments as JSON text.

    Raises:
        ChatError: Calls are no objects, or the text of arguments is no JSON object.
    """
    found: list[Mapping[str, Any]] = []
    for number, message in enumerate(messages):
        calls = message.get("tool_calls")
        if calls:
            if not isinstance(calls, list | tuple):
                raise ChatError(f"message {number}: tool_calls is {shorten(calls)}; give a list")
            message = {**message, "tool_calls": [_with_object(call, number) for call in calls]}
        found.append(message)
    return found


def _with_object(call: Any, number: int) -> Mapping[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        text = f"message {number}: a call is {shorten(call)}; give an object with a function"
        raise ChatError(text)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        value = parse_json(arguments.encode(), name="arguments")
    except (FileError, UnicodeEncodeError) as error:
        raise ChatError(f"message {number}: the arguments of a call are no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ChatError(f"message {number}: the arguments of a call are no object; give one")
    with_object = {**function, "arguments": value}
    return {**call, "function": with_object} if "function" in call else with_object


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its reasoning under the names that templates read."""
    given = (message.get(name) for name in _REASONING)
    found = next((each for each in given if each is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _with_part(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose content, if it is a text, is a list with one part."""
    content = message.get("content")
    return {**message, "content": [_text_part(content)]} if isinstance(content, str) else message


class ChatTemplate:
    """A model's chat template, rendered by a sandbox in a separate process with limits.

    The template is code from the model's folder. Jinja's immutable sandbox runs it in a process
    that is killed and restarted if it takes too long. A template that ignores contents without
    parts, such as LLaVA's, gets each text as a part.

    Args:
        source: The Jinja template.
        tokenizer: Tokenizer of the model; None writes text in which every name of a special token
            stands for the token.
        tokens: Special tokens that the template may name, such as `bos_token`, and other variables
            for all conversations, such as `enable_thinking`. A missing `eos_token` is the
            tokenizer's end-of-document token.
        limits: Limits of the process for the texts of a conversation.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer | None = None,
        *,
        tokens: Mapping[str, Any] | None = None,
        limits: ChatLimits | None = None,
    ) -> None:
        require("jinja2", "rendering a chat template")
        self.source, self.tokenizer = source, tokenizer
        self.tokens = {} if tokenizer is None else {"eos_token": tokenizer.eod_token}
        self.tokens |= tokens or {}
        self._literals = Literals(() if tokenizer is None else tokenizer.special_tokens)
        self._limits = limits or ChatLimits()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @classmethod
    def from_folder(
        cls,
        folder: Path | str,
        tokenizer: Tokenizer | None = None,
        *,
        limits: ChatLimits | None = None,
    ) -> ChatTemplate:
        """Read the template of a folder of Hugging Face.

        It is in `chat_template.jinja`, in `chat_template.json` as older folders of models that take
        images have it, or in `tokenizer_config.json`, where a list of templates has one named
        `default`.

        Raises:
            ChatError: The folder has none.
            FileError: A file can't be read.
        """
        source, tokens = read_template(folder)
        if source is None:
            raise ChatError(
                f"{folder} has no chat template, neither as chat_template.jinja nor in "
                "tokenizer_config.json; its model continues texts, so give it a prompt"
            )
        return cls(source, tokenizer, tokens=tokens, limits=limits)

    def write(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> ChatText:
        """Return the text of a conversation, for `Tokenizer.encode_chat`.

        Args:
            messages: Mappings with `role`, `content` and what else the template reads.
            tools: JSON schemas of functions that the model may call.
            add_generation_prompt: Whether the text ends where the assistant begins to speak.
            variables: Further variables of the template, such as `enable_thinking`.

        Raises:
            ChatError: The template refuses the messages, is wrong, or goes beyond its limits.
        """
        wanted = [(len(messages), add_generation_prompt)]
        return self._texts(messages, tools, variables, wanted)[0]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> Rendered:
        """Return the tokens of a whole conversation, and what a model learns of it.

        It learns the assistant's messages with the tokens that end them, and nothing that a prompt
        supplies. A template with `{% generation %}` says where they are; otherwise the texts of the
        conversation's beginnings do. A message may have `train: false`, or a `weight` of its loss.

        Args:
            messages: Mappings with `role`, `content` and what else the template reads.
            tools: JSON schemas of functions that the model may call.
            variables: Further variables of the template, such as `enable_thinking`.

        Raises:
            ChatError: It is not known which part is a message to learn; the template refuses the
                messages, is wrong, or goes beyond its limits; there is no tokenizer.
        """
        if self.tokenizer is None:
            raise ChatError("a conversation to learn needs the tokenizer; give it to ChatTemplate")
        plain, weights = split_training(messages)
        for number, weight in weights.items():
            if weight and not (plain[number].get("content") or plain[number].get("tool_calls")):
                raise ChatError(
                    f"message {number} is to be learnt and has neither content nor tool_calls; "
                    "give it train: false, or remove it"
                )
        learnt = [number for number, weight in weights.items() if weight]
        whole = (len(plain), False)
        if _TAG.search(self.source):
            wanted = [(number + 1, False) for number in weights] if learnt else []
            first, *rest = self._texts(plain, tools, variables, [whole, *wanted], spans=True)
            turns = turns_by_tag(first, dict(zip(weights, rest, strict=False)), weights)
        else:
            wanted = [each for n in learnt for each in ((n, True), (n + 1, False))]
            first, *rest = self._texts(plain, tools, variables, [whole, *wanted])
            pairs = zip(rest[::2], rest[1::2], strict=True)
            turns = turns_by_prefix(first, dict(zip(learnt, pairs, strict=True)), weights)
        encoded = self.tokenizer.encode_chat_places(first)
        return Rendered(encoded.ids, trained_of(self.tokenizer, first.text, encoded, turns))

    def _texts(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        wanted: Sequence[tuple[int, bool]],
        *,
        spans: bool = False,
    ) -> list[ChatText]:
        """Return texts of first messages, each with or without the prompt for an answer."""
        plain = [_with_reasoning(each) for each in messages]
        if not self._reads_texts:
            plain = [_with_part(each) for each in plain]
        given = {**variables, "tools": None if tools is None else list(tools)}
        try:
            (plain, given), marks = self._literals.mark((plain, given))
            span = free_marks((plain, given, self.source), 2) if spans else ["", ""]
        except (ValueError, RecursionError) as error:
            raise ChatError(f"{_UNFIT}: {error}") from None
        asked = {"messages": plain, "variables": self.tokens | given, "texts": wanted, "span": span}
        with self._lock:
            answer = self._ask(asked)
        if "error" not in answer:
            return [restore(text, marks, span) for text in answer["texts"]]
        where = ""
        if number := answer.get("number"):
            count, has_prompt = wanted[number]
            where = f" as far as message {count if has_prompt else count - 1}"
        raise ChatError(f"{_UNFIT}{where}: {answer['error']}")

    @cached_property
    def _reads_texts(self) -> bool:
        """Whether it writes contents that are texts; models with images may read parts alone."""
        return self._shows(_PROBE) or not self._shows([_text_part(_PROBE)])

    def _shows(self, content: object) -> bool:
        """Return whether it writes the probe in a content."""
        messages = [{"role": "user", "content": content}]
        given = {"messages": messages, "variables": {**self.tokens, "tools": None}}
        with self._lock:
            answer = self._ask({**given, "texts": [(1, False)], "span": ["", ""]})
        return any(_PROBE in text for text in answer.get("texts", ()))

    def close(self) -> None:
        """End the process; the next `render` starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                cast("BinaryIO", pipe).close()
        process.wait(_ENDED)

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Send variables to the process, and return its answer."""
        from mt_tokenizer.rendering import receive, send

        limits = self._limits
        timer = threading.Timer(10 * limits.cpu_seconds, self._kill)
        timer.start()
        try:
            if self._process is None:
                self._start()
            process = cast("subprocess.Popen[bytes]", self._process)
            send(cast("BinaryIO", process.stdin), variables)
            return receive(cast("BinaryIO", process.stdout))
        except (TypeError, ValueError) as error:
            return {"error": f"they are no JSON values ({error})"}
        except (EOFError, OSError):
            self.close()
            return {
                "error": f"it took more than {limits.cpu_seconds} s or "
                f"{limits.memory_bytes >> 20} MiB"
            }
        finally:
            timer.cancel()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _start(self) -> None:
        from mt_tokenizer.rendering import receive, send

        # -P: do not import from the working directory.
        command = [sys.executable, "-P", "-m", "mt_tokenizer.rendering"]
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter and our own module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        send(
            cast("BinaryIO", self._process.stdin),
            {"template": self.source, **asdict(self._limits)},
        )
        answer = receive(cast("BinaryIO", self._process.stdout))
        if "error" in answer:
            self.close()
            raise ChatError(f"the chat template is wrong: {answer['error']}")


def _fields(path: Path) -> dict[str, Any]:
    """Return the mapping of a JSON file, an empty one if it is missing."""
    found = read_json(path, limit=1 << 26) if path.exists() else {}
    if not isinstance(found, dict):
        raise ChatError(f"{path} is no mapping of fields; restore it")
    return found


def read_template(folder: Path | str) -> tuple[str | None, dict[str, str]]:
    """Return the chat template of a folder, if it has one, and special tokens that it may name.

    Raises:
        ChatError: tokenizer_config.json or chat_template.json is damaged.
        FileError: A file can't be read.
    """
    folder = Path(folder)
    config = _fields(folder / "tokenizer_config.json")
    source = _fields(folder / "chat_template.json").get(
        "chat_template", config.get("chat_template")
    )
    if isinstance(source, list):
        named = (each for each in source if isinstance(each, dict))
        source = next((e.get("template") for e in named if e.get("name") == "default"), None)
    if (folder / "chat_template.jinja").exists():
        source = read_text(folder / "chat_template.jinja", limit=_MOST_BYTES)
    given = {name: config.get(name) for name in _TOKENS}
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in given.items()}
    tokens = {name: text for name, text in texts.items() if isinstance(text, str)}
    return source if isinstance(source, str) else None, tokens
