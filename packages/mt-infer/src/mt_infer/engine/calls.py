"""The calls of an engine that wait for requests: whole answers, streams, scores and vectors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Unpack

import torch
from torch import Tensor

from mt_infer.completion import Completion, Delta
from mt_infer.engine.answer import Answer, all_ended, any_ready, completed, news_of
from mt_infer.engine.intake import CallOptions, Intake, Prompt, Prompts, Samplings, as_list
from mt_infer.engine.loop import Loop
from mt_infer.engine.ranks import Ranks
from mt_infer.images import Images, Pixels
from mt_infer.sampling import Sampling

_MOMENT_S = 0.02


class Calls:
    """The calls of `Engine` that wait for requests.

    Args:
        intake: Maker of requests from prompts.
        loop: Loop that serves the requests.
        ranks: The ranks that serve the same requests.
    """

    def __init__(self, intake: Intake, loop: Loop, ranks: Ranks) -> None:
        self._intake, self._loop, self._ranks = intake, loop, ranks
        self._lock, self._goes_on = loop.lock, threading.Event()
        self._goes_on.set()

    def generate(
        self,
        prompts: Prompts,
        sampling: Samplings = None,
        images: Images = None,
        **how: Unpack[CallOptions],
    ) -> list[Completion]:
        """Continue prompts.

        Args:
            prompts: A text or a list of tokens, or a list of these.
            sampling: How to choose tokens, for all prompts or for each.
            images: For each prompt the images of its image tokens, as pixel values [C, H, W]; None
                for no images.
            how: `adapter`, a name for all prompts or for each, and `service`, a `Service`.

        Returns:
            The continuations in the order of the prompts; the n of one prompt follow one another.

        Raises:
            PromptError: The model can't continue a prompt.
            LogitsError: The scores of a continuation have NaN, or no finite maximum.
        """
        return self._finished(self._intake.answers(prompts, sampling, images, **how))

    def stream(
        self,
        prompts: Prompts,
        sampling: Samplings = None,
        images: Images = None,
        **how: Unpack[CallOptions],
    ) -> Iterator[Delta]:
        """Continue prompts, and yield the deltas as they come; see `generate`."""
        answers = self._intake.answers(prompts, sampling, images, streams=True, **how)
        with self._loop.submitted(answers):
            while True:
                has_ended = all_ended(answers)  # before news are taken, as other callers make more
                yield from news_of(answers)
                if has_ended:
                    return
                self._advance(lambda: any_ready(answers))

    async def agenerate(
        self,
        prompts: Prompts,
        sampling: Samplings = None,
        images: Images = None,
        **how: Unpack[CallOptions],
    ) -> list[Completion]:
        """Continue prompts beside other calls of the event loop; see `generate`."""
        answers = self._intake.answers(prompts, sampling, images, **how)
        with self._loop.submitted(answers):
            while not all_ended(answers):
                await asyncio.to_thread(self._advance, lambda: all_ended(answers))
            return [completed(each) for each in answers]

    async def astream(
        self,
        prompts: Prompts,
        sampling: Samplings = None,
        images: Images = None,
        **how: Unpack[CallOptions],
    ) -> AsyncIterator[Delta]:
        """Yield the deltas of continuations beside other calls of the event loop."""
        answers = self._intake.answers(prompts, sampling, images, streams=True, **how)
        with self._loop.submitted(answers):
            while True:
                has_ended = all_ended(answers)
                for delta in news_of(answers):
                    yield delta
                if has_ended:
                    return
                await asyncio.to_thread(self._advance, lambda: any_ready(answers))

    def answers(
        self,
        prompts: Prompts,
        sampling: Samplings = None,
        images: Images = None,
        **how: Unpack[CallOptions],
    ) -> list[Answer]:
        """Return empty answers for `submitted`; see `generate`."""
        return self._intake.answers(prompts, sampling, images, streams=True, **how)

    def submitted(self, answers: list[Answer]) -> AbstractContextManager[None]:
        """Hand in answers for `advance` to fill; the block's end cancels unfinished ones."""
        return self._loop.submitted(answers)

    def advance(self) -> bool:
        """Serve all requests for one pass, and return whether some continue."""
        self._advance(lambda: False)
        return self._loop.has_work

    def score(
        self,
        tokens: Sequence[int] | Tensor,
        *,
        prompt: Prompt | None = None,
        images: Sequence[Pixels] = (),
        adapter: str | None = None,
    ) -> Tensor:
        """Return the logprob of each token of a text except the first, by the model's scores.

        Args:
            tokens: The text.
            prompt: Prompt for the encoder, if the model has one. Then the decoder begins with its
                start token, so all tokens have logprobs.
            images: Images among the tokens.
            adapter: Name of the adapter; None for none.

        Shape:
            tokens: [S]. Returns [S - 1], or [S] after a prompt; fp32.
        """
        whole = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        given = self._intake.text(whole, prompt, images)
        how = Sampling(max_tokens=0, prompt_logprobs=0, seed=0)
        done = self._finished([self._intake.answer(given, how, adapter)])[0]
        return torch.tensor(done.prompt_logprobs)

    def embed(self, prompts: Prompts, *, pooling: Literal["last", "mean"] = "last") -> Tensor:
        """Return a vector for each prompt, from the features that the head reads.

        Args:
            prompts: See `generate`.
            pooling: `last` takes the features of the last token, which has seen all others, and
                `mean` their mean over the tokens.

        Shape:
            Returns [N, hidden], fp32.
        """
        self._loop.runner.check_embeds(pooling)
        given, found = [self._intake.given(each).tokens for each in as_list(prompts)], []
        for tokens in given:
            with self._lock:
                self._loop.runner.check_awake()
                how = {"tokens": tokens, "mean": pooling == "mean"}
                found.append(self._ranks.do(self._loop.runner.embedding, **how))
        return torch.stack(found)

    def pause(self) -> None:
        """Let the running pass end, and make none until `resume`.

        Requests keep their blocks, and calls that wait for them keep waiting.
        """
        self._goes_on.clear()
        with self._lock:
            pass

    def resume(self) -> None:
        """Continue after `pause`."""
        self._goes_on.set()

    def _finished(self, answers: list[Answer]) -> list[Completion]:
        """Hand in requests, step until all have ended, and return their completions."""
        with self._loop.submitted(answers):
            while not all_ended(answers):
                self._advance(lambda: all_ended(answers))
        return [completed(each) for each in answers]

    def _advance(self, is_ready: Callable[[], bool]) -> None:
        """Step once, unless another thread's step has made the answers ready.

        A paused engine waits only for a moment, so that the threads of an event loop are free for
        the call that resumes it.
        """
        if not self._goes_on.wait(_MOMENT_S):
            return
        with self._lock:
            if self._goes_on.is_set() and not is_ready():
                self._loop.step()
