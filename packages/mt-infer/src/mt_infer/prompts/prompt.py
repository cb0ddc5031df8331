"""Prompts of requests to tokens, beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mt_files import MissingExtraError, to_plain
from mt_tokenizer import (
    AnswerForm,
    ChatError,
    ChatTemplate,
    ChatText,
    Tokenizer,
    TokenizerError,
    with_parsed_arguments,
)

from mt_infer.backends.backend import Backend, Picture
from mt_infer.forms.chat import ChatForm, Message
from mt_infer.forms.refusal import FormError
from mt_infer.prompts.pictures import picture_of

_MOST_IMAGES = 16


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt in the form that the engine takes.

    Attributes:
        tokens: Its tokens.
        text: Its text; None if tokens were given.
        images: Images among its tokens.
    """

    tokens: list[int]
    text: str | None = None
    images: list[Picture] = field(default_factory=list)


class Prompts:
    """A converter of prompts to tokens.

    Args:
        backend: The engine.
        max_bytes: Largest text of the prompts of a request, before it is tokenised.
    """

    def __init__(self, backend: Backend, max_bytes: int) -> None:
        self._backend, self._max_bytes = backend, max_bytes
        self._template: ChatTemplate | None = None
        self._renders = asyncio.Lock()  # one process renders

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            FormError: The model has no tokenizer.
        """
        if self._backend.tokenizer is None:
            raise FormError("", "the model has no tokenizer; send tokens, to /v1/completions")
        return self._backend.tokenizer

    async def of(self, given: Sequence[str | list[int]], param: str) -> list[Prompt]:
        """Return the tokens of prompts, each a text or a list of tokens.

        Args:
            given: The prompts.
            param: Name of their field.

        Raises:
            FormError: A prompt is too long, or has an unknown token.
        """
        texts = [each for each in given if isinstance(each, str)]
        self._check_size(texts, param)
        rows = iter(await asyncio.to_thread(self._encoded, texts) if texts else ())
        found = []
        for number, each in enumerate(given):
            where = param if len(given) == 1 else f"{param}[{number}]"
            text = each if isinstance(each, str) else None
            tokens = next(rows) if isinstance(each, str) else each
            found.append(Prompt(tokens=self._checked(tokens, where), text=text))
        return found

    async def chat(self, form: ChatForm) -> Prompt:
        """Return the prompt of a conversation, by the model's chat template.

        Raises:
            FormError: There is no template, or it can't render the messages.
        """
        images = await self._pictures(form.messages)
        async with self._renders:
            written = await asyncio.to_thread(self._written, form)
        self._check_size([written.text], "messages")
        tokens = await asyncio.to_thread(self.tokenizer.encode_chat, written)
        return Prompt(tokens=self._checked(tokens, "messages"), text=written.text, images=images)

    @cached_property
    def form(self) -> AnswerForm:
        """The model's marks of calls and reasoning, available after a template was rendered."""
        assert self._template is not None, "chat() has rendered"  # noqa: S101
        return AnswerForm.find(self._template.source, self.tokenizer.special_tokens)

    def close(self) -> None:
        """End the process of the template."""
        if self._template is not None:
            self._template.close()

    def _encoded(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of texts; an empty text is the end-of-document token."""
        tokenizer, found = self.tokenizer, []
        for text in texts:
            try:
                tokens = tokenizer.encode_prompt(text) or [tokenizer.eod_id]
            except TokenizerError as error:
                raise FormError("", f"a prompt is not valid text: {error}") from None
            if self._backend.facts.has_encoder and tokens[-1] != tokenizer.eod_id:
                tokens.append(tokenizer.eod_id)
            found.append(tokens)
        return found

    def _checked(self, tokens: list[int], param: str) -> list[int]:
        facts = self._backend.facts
        most = facts.max_sequence_length - (0 if facts.has_encoder else 1)
        if not tokens:
            raise FormError(param, "has no tokens; give one or more")
        if len(tokens) > most:
            raise FormError(
                param,
                f"has {len(tokens)} tokens; the model's context takes {most} and an answer",
                code="context_length_exceeded",
            )
        wrong = next((each for each in tokens if not 0 <= each < facts.vocab_size), None)
        if wrong is not None:
            raise FormError(
                param, f"{wrong} is no token of the model; use 0 to {facts.vocab_size - 1}"
            )
        return tokens

    def _check_size(self, texts: Sequence[str], param: str) -> None:
        size = sum(len(each.encode()) for each in texts)
        if size > self._max_bytes:
            text = f"has {size} bytes of text; at most {self._max_bytes} are tokenised"
            raise FormError(param, text, code="context_length_exceeded")

    async def _pictures(self, messages: Sequence[Message]) -> list[Picture]:
        urls = [
            (url, f"messages[{number}].content")
            for number, message in enumerate(messages)
            for url in message.images
        ]
        if urls and not self._backend.facts.takes_images:
            raise FormError(urls[0][1], "has an image, and the model takes text alone")
        if len(urls) > _MOST_IMAGES:
            raise FormError("messages", f"has {len(urls)} images; use at most {_MOST_IMAGES}")
        return [await picture_of(*each) for each in urls]  # one process at a time

    def _written(self, form: ChatForm) -> ChatText:
        tools = None
        if form.tools and form.tool_choice != "none":
            tools = [_without_none(to_plain(each)) for each in form.tools]
        try:
            if self._template is None:
                self._template = self._opened()
            messages = with_parsed_arguments([each.plain for each in form.messages])
            return self._template.write(messages, tools=tools, **form.variables)
        except (ChatError, MissingExtraError) as error:
            raise FormError("messages", str(error)) from None

    def _opened(self) -> ChatTemplate:
        folder = self._backend.folder
        if folder is None:
            raise ChatError("the model has no folder with a chat template; use /v1/completions")
        try:
            return ChatTemplate.from_folder(folder, self.tokenizer)
        except ChatError:
            raise ChatError(
                "the model has no chat template, neither as chat_template.jinja nor in "
                "tokenizer_config.json; it continues texts, so use /v1/completions"
            ) from None


def _without_none(tool: Mapping[str, object]) -> dict[str, object]:
    """Return a tool without the fields that its client has not sent."""
    function = tool["function"]
    assert isinstance(function, dict), "it is a mapping"  # noqa: S101
    sent = {k: v for k, v in function.items() if v is not None and k != "strict"}
    return {**tool, "function": sent}
