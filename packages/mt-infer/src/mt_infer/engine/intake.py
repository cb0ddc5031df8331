"""Requests from callers: prompts and parameters are checked and become answers to fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import cast

from mt_model import ModelConfig
from mt_tokenizer import Tokenizer

from mt_infer.engine.answer import Answer, is_wanted
from mt_infer.engine.grammar import Grammars
from mt_infer.engine.request import Request
from mt_infer.images import Image, Pixels, Preprocess, place_images
from mt_infer.sampling import Sampling
from mt_infer.text import PromptError, StopTexts, check_prompt, check_tokens, encode_prompt

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]


def as_list(prompts: Prompts) -> list[Prompt]:
    """Return a prompt, or several, as a list of prompts."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a continuation begins with; see `Request`.

    Attributes:
        tokens: Tokens that it continues.
        source: Tokens for the encoder.
        images: Images among the tokens.
    """

    tokens: list[int]
    source: tuple[int, ...] = ()
    images: tuple[Image, ...] = ()


class Intake:
    """What turns a prompt and its parameters into a request.

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

    def given(self, prompt: Prompt, images: Sequence[Pixels] = ()) -> Given:
        """Return what the continuation of a prompt begins with.

        Raises:
            PromptError: The model can't continue it.
        """
        if not isinstance(prompt, str):
            tokens = [int(each) for each in prompt]
        elif self._tokenizer is None:
            raise PromptError("the model has no tokenizer; give the prompt as a list of tokens")
        else:
            tokens = encode_prompt(prompt, self._tokenizer, self._config)
        tokens, placed = place_images(tokens, images, self._config, self._preprocess)
        check_prompt(tokens, self._config)
        if self._config.encoder_layers:
            return Given(tokens=[self._config.decoder_start], source=tuple(tokens))
        return Given(tokens=tokens, images=placed)

    def text(self, tokens: Sequence[int], prompt: Prompt | None, images: Sequence[Pixels]) -> Given:
        """Return a whole text, whose tokens are to be scored.

        Args:
            tokens: Its tokens.
            prompt: What the encoder reads; None without an encoder.
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

    def answer(self, number: int, given: Given, sampling: Sampling, seed: int) -> Answer:
        """Return an empty answer with its request.

        Args:
            number: Order of arrival.
            given: What it continues.
            sampling: Parameters of the choice.
            seed: Seed of the choice.

        Raises:
            ValueError: A list of tokens has one that the model doesn't know, the grammar is bad, or
                an encoder's prompt should have logprobs.
            MissingExtraError: The library of grammars is not installed.
        """
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
            number=number,
            tokens=list(tokens),
            source=given.source,
            images=given.images,
            limit=min(longest, len(tokens) + max(1, sampling.max_tokens)),
            reads_cache=not is_wanted(sampling.prompt_logprobs),
        )
        tokenizer = self._tokenizer
        return Answer(
            request=request,
            sampling=sampling,
            seed=seed,
            prompt_length=len(tokens),
            ends=ends,
            bad=bad,
            grammar=self._grammars.of(sampling, ends),
            stops=None if tokenizer is None else StopTexts(sampling.stop, tokenizer),
        )

    def _bad_words(self, sampling: Sampling) -> tuple[tuple[int, ...], ...]:
        """Return the token lists of bad words, which may begin a word or continue one."""
        found: list[tuple[int, ...]] = []
        for word in sampling.bad_words:
            if not isinstance(word, str):
                found.append(word)
            elif self._tokenizer is None:
                raise ValueError("bad_words: the model has no tokenizer; give lists of tokens")
            else:
                found += [tuple(self._tokenizer.encode(text)) for text in (word, f" {word}")]
        return tuple(dict.fromkeys(found))
