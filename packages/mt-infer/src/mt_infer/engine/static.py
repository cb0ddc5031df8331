"""The static engine: one fixed batch, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from mt_model import GPT
from mt_tokenizer import Tokenizer

from mt_infer.completion import Completion
from mt_infer.engine.answer import Answer
from mt_infer.engine.chooser import Wanted, choose_next, follow
from mt_infer.engine.intake import Intake, Prompts, Samplings
from mt_infer.engine.options import EngineOptions
from mt_infer.engine.request import Part, Request
from mt_infer.engine.runner import Runner


class StaticEngine:
    """A model that reads several prompts in one pass, and adds a token to each in every later pass.

    It runs the same pass and choice as `Engine`, so the tokens are the same. Nothing waits, shares
    blocks or is guessed, and a prompt can't join while others run: it shows the cost of one batch,
    and is the shortest code to read on how text is generated.

    Args:
        model: The model.
        tokenizer: The tokenizer of its training; None for token lists alone.
        ends: Tokens that end a text.
        options: Sizes: `blocks` and `max_batch` bound a batch, `max_batch_tokens` does not.
    """

    def __init__(
        self,
        model: GPT,
        *,
        tokenizer: Tokenizer | None = None,
        ends: Sequence[int] | frozenset[int] = (),
        options: EngineOptions | None = None,
    ) -> None:
        self._options = EngineOptions() if options is None else options
        self._runner, self._tokenizer = Runner(model, self._options, None), tokenizer
        self._vocab_size = model.config.vocab_size if tokenizer is None else tokenizer.vocab_size
        vocabulary = self._vocab_size
        self._intake = Intake(model.config, tokenizer, frozenset(ends), vocab_size=vocabulary)

    @torch.inference_mode()
    def generate(self, prompts: Prompts, sampling: Samplings = None) -> list[Completion]:
        """Continue prompts; see `Engine.generate`.

        Raises:
            ValueError: There are more prompts or tokens than fit at once.
        """
        answers = self._answers(prompts, sampling)
        for each in answers:
            if each.request.source:
                self._runner.encode(each.request)
        running = answers
        while running:
            parts = [_next_part(each.request) for each in running]
            wanted = [Wanted.of(*pair) for pair in zip(parts, running, strict=True)]
            scores = self._runner.scores(parts, [each.places for each in wanted])
            drawn = choose_next(scores[:, : self._vocab_size], wanted)
            for part, answer, tokens in zip(parts, running, drawn, strict=True):
                new, end = follow(part, answer, tokens)
                if answer.error is not None:
                    raise answer.error
                part.request.held += part.count
                part.request.tokens += new
                if self._runner.restarts(part.request.held, len(part.request.tokens)):
                    part.request.held = 0  # all keys change at this length
                if end is not None:
                    answer.complete(end, self._tokenizer, None)
            running = [each for each in running if not each.has_ended]
        return [cast("Completion", each.completion) for each in answers]

    def _answers(self, prompts: Prompts, sampling: Samplings) -> list[Answer]:
        """Return an empty answer for each continuation, with a place in the batch and blocks."""
        answers = self._intake.answers(prompts, sampling)
        free = 0
        for answer in answers:
            request = answer.request
            lengths = request.limit - 1, len(request.source)
            needed, more = (-(-length // self._options.block_size) for length in lengths)
            request.state, request.table = answer.index, list(range(free, free + needed))
            request.memory = list(range(free + needed, free + needed + more))
            free += needed + more
        self._check(len(answers), free)
        return answers

    def _check(self, number: int, blocks: int) -> None:
        options = self._options
        known = options.num_blocks(self._runner.model.config)
        if number > options.max_batch or blocks > known:
            raise ValueError(
                f"{number} continuations need {blocks} blocks, and the batch has room for "
                f"{options.max_batch} in {known}; raise max_batch and blocks, or use Engine, "
                "where they wait"
            )


def _next_part(request: Request) -> Part:
    return Part(request=request, start=request.held, count=request.pending)
