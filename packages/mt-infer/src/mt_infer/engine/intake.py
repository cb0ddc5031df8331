"""Requests from callers: checks of prompts and parameters, and empty answers for them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any, TypedDict, cast

from mt_model import ModelConfig
from mt_tokenizer import Tokenizer

from mt_infer.choosing.grammar import Grammars
from mt_infer.engine.adapters import AdapterNames, adapter_of_each
from mt_infer.engine.answer import Answer, is_wanted
from mt_infer.engine.request import Request
from mt_infer.images import Image, Images, Pixels, Preprocess, images_of_each, place_images
from mt_infer.sampling import Sampling
from mt_infer.service import Service
from mt_infer.text import (
    PromptError,
    StopTexts,
    TextStream,
    check_prompt,
    check_tokens,
    encode_prompt,
)

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]
Samplings = Sampling | Sequence[Sampling] | None


class CallOptions(TypedDict, total=False):
    """Options of a call's requests, besides prompts, parameters of the choice and images.

    Attributes:
        adapter: Name of the adapter, for all prompts or for each.
        service: Priority, deadline and caller.
    """

    adapter: AdapterNames
    service: Service


def as_list(prompts: Prompts) -> list[Prompt]:
    """Return a prompt, or several, as a list of prompts."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


@dataclass(frozen=True, kw_only=True)
class Given:
    """The beginning of a continuation; see `Request`.

    Attributes:
        tokens: Tokens to continue.
        source: Tokens for the encoder.
        images: Images among the tokens.
    """

    tokens: list[int]
    source: tuple[int, ...] = ()
    images: tuple[Image, ...] = ()


class Intake:
    """A maker of requests from prompts and parameters.

    Args:
        config: Config of the model.
        tokenizer: Tokenizer of the model; None for token lists alone.
        ends: Tokens that end a text.
        vocab_size: Number of tokens to choose from, without the vocabulary's padding.
        preprocess: Function that makes pixel values of images; None for pixel values alone.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        ends: frozenset[int],
        *,
        vocab_size: int,
        preprocess: Preprocess | None = None,
    ) -> None:
        self._config, self._tokenizer, self._ends = config, tokenizer, ends
        self._vocab_size, self._preprocess = vocab_size, preprocess
        self._grammars = Grammars(tokenizer)
        self._numbers = count()

    def given(self, prompt: Prompt, images: Sequence[Pixels] = (), *, fills: bool = False) -> Given:
        """Return the beginning of a prompt's continuation.

        Args:
            prompt: The prompt.
            images: Images of its image tokens.
            fills: Whether a list of tokens may fill the context.

        Raises:
            PromptError: The model can't continue the prompt.
        """
        if not isinstance(prompt, str):
            tokens = [int(each) for each in prompt]
        elif self._tokenizer is None:
            raise PromptError("the model has no tokenizer; give the prompt as a list of tokens")
        else:
            tokens = encode_prompt(prompt, self._tokenizer, self._config)
        tokens, placed = place_images(tokens, images, self._config, self._preprocess)
        check_prompt(tokens, self._config, fills=fills)
        if self._config.encoder_layers:
            return Given(tokens=[self._config.decoder_start], source=tuple(tokens))
        return Given(tokens=tokens, images=placed)

    def text(self, tokens: Sequence[int], prompt: Prompt | None, images: Sequence[Pixels]) -> Given:
        """Return a whole text, for scores of its tokens.

        Args:
            tokens: Its tokens.
            prompt: Prompt for the encoder; None without an encoder.
            images: Images among the tokens.
        """
        config, longest = self._config, self._config.max_sequence_length
        if (prompt is not None) != bool(config.encoder_layers):
            raise PromptError(
                "prompt: an encoder reads it before tokens are scored; give it for a model with an "
                "encoder, and for no other"
            )
        if prompt is None:
            given, placed = place_images(tokens, images, config, self._preprocess)
            found = Given(tokens=given, images=placed)
        else:
            source = self.given(prompt).source
            found = Given(tokens=[config.decoder_start, *tokens], source=source)
        check_tokens(found.tokens, config)
        if not 1 < len(found.tokens) <= longest:
            raise PromptError(f"{len(found.tokens)} tokens have no scores; give 2 to {longest}")
        return found

    def answers(
        self,
        prompts: Prompts,
        sampling: Samplings,
        images: Images = None,
        adapter: AdapterNames = None,
        service: Service | None = None,
        *,
        streams: bool = False,
    ) -> list[Answer]:
        """Return empty answers with their requests; the n of one prompt follow one another.

        Args:
            prompts: A prompt, or a list of them.
            sampling: Parameters of the choice, for all prompts or for each.
            images: For each prompt the images of its image tokens.
            adapter: Name of the adapter, for all prompts or for each.
            service: Priority, deadline and caller.
            streams: Whether a caller waits for their deltas.

        Raises:
            PromptError: The model can't continue a prompt.
            ValueError: A list has an unknown token, or there is not one sampling for each prompt.
        """
        given = as_list(prompts)
        if sampling is None or isinstance(sampling, Sampling):
            sampling = [sampling or Sampling()] * len(given)
        if len(sampling) != len(given):
            raise ValueError(f"{len(sampling)} samplings for {len(given)} prompts; give one each")
        service = service or Service()
        served: dict[str, Any] = {"priority": service.priority, "caller": service.caller}
        if service.deadline_s is not None:
            served["deadline"] = time.monotonic() + service.deadline_s
        answers: list[Answer] = []
        each = images_of_each(images, len(given)), adapter_of_each(adapter, len(given))
        for prompt, how, pictures, name in zip(given, sampling, *each, strict=True):
            begun = self.given(prompt, pictures, fills=how.max_tokens == 1)
            if how.seed is None:
                how = replace(how, seed=secrets.randbits(32))
            for choice in range(how.n):
                own = {"number": next(self._numbers), "choice": choice}
                answer = self.answer(begun, how, name, **own, **served)
                answer.index, answer.streams = len(answers), streams
                answers.append(answer)
        return answers

    def answer(
        self,
        given: Given,
        sampling: Sampling,
        adapter: str | None = None,
        *,
        choice: int = 0,
        **served: Any,
    ) -> Answer:
        """Return an empty answer with its request; other ranks make it from the same arguments.

        Args:
            given: Beginning of the continuation.
            sampling: Parameters of the choice, with a seed.
            adapter: Name of the adapter; None for none.
            choice: Number among the continuations of the prompt.
            served: Number, priority, deadline and caller.

        Raises:
            ValueError: A list has an unknown token, the grammar is bad, or logprobs are wanted for
                an encoder's prompt.
            MissingExtraError: The library of grammars is not installed.
        """
        served.setdefault("number", next(self._numbers))
        asked = {"given": given, "sampling": sampling, "adapter": adapter, "choice": choice}
        tokens, ends = given.tokens, self._ends | set(sampling.stop_token_ids)
        if len(tokens) == 1 and given.source and is_wanted(sampling.prompt_logprobs):
            raise ValueError(
                "prompt_logprobs: an encoder reads the prompt without scores; use None"
            )
        bad = self._bad_words(sampling)
        ids = {*sampling.logit_bias, *sampling.allowed_token_ids, *chain.from_iterable(bad)}
        check_tokens(list(ids), self._config)
        if ids and max(ids) >= self._vocab_size:
            raise ValueError(
                f"the token {max(ids)} is of the vocabulary's padding, and is never chosen; use "
                f"tokens below {self._vocab_size} in logit_bias, allowed_token_ids and bad_words"
            )
        longest = max(len(tokens) + 1, self._config.max_sequence_length)
        request = Request(
            tokens=list(tokens),
            source=given.source,
            images=given.images,
            limit=min(longest, len(tokens) + max(1, sampling.max_tokens)),
            reads_cache=not is_wanted(sampling.prompt_logprobs),
            **served,
        )
        tokenizer = self._tokenizer
        stops = None if tokenizer is None else StopTexts(sampling.stop, tokenizer)
        return Answer(
            asked=asked | served,
            request=request,
            choice=choice,
            sampling=sampling,
            seed=sampling.seed or 0,
            prompt_length=len(tokens),
            adapter=adapter,
            ends=ends,
            bad=bad,
            grammar=self._grammars.of(sampling, ends),
            stops=stops,
            stream=None if tokenizer is None or stops is None else TextStream(tokenizer, stops),
        )

    def _bad_words(self, sampling: Sampling) -> tuple[tuple[int, ...], ...]:
        """Return the token lists of bad words, both at the start of a word and inside one."""
        found: list[tuple[int, ...]] = []
        for word in sampling.bad_words:
            if not isinstance(word, str):
                found.append(word)
            elif self._tokenizer is None:
                raise ValueError("bad_words: the model has no tokenizer; give lists of tokens")
            else:
                found += [tuple(self._tokenizer.encode(text)) for text in (word, f" {word}")]
        return tuple(dict.fromkeys(found))
