"""The engine: continuations of many prompts at once, each with the tokens it would have alone."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mt_model import GPT
from mt_parallel_state import ParallelLayout, ParallelState
from mt_tokenizer import Tokenizer
from torch import Tensor

from mt_infer.completion import Completion, Delta
from mt_infer.engine.adapters import AdapterNames, AdapterSource, adapter_of_each
from mt_infer.engine.answer import Answer, all_ended, any_ready, completed, news_of
from mt_infer.engine.intake import Given, Intake, Prompt, Prompts, as_list
from mt_infer.engine.loop import Loop
from mt_infer.engine.options import EngineOptions
from mt_infer.engine.weights import WORLD, Weights, loaded_model, obstacle_of, with_draft
from mt_infer.images import Images, Pixels, images_of_each
from mt_infer.loading import Run, open_run, same_run
from mt_infer.sampling import Sampling
from mt_infer.text import TextStream


class Engine:
    """A model that continues many prompts at once.

    Its methods may be called from several threads; one of them runs the passes for all. Ranks that
    share a model's tensors, experts or layers make the same calls.

    Args:
        model: The model.
        tokenizer: The one that it was trained with; None for token lists alone.
        ends: Tokens that end a text.
        options: Sizes and switches.
        run: The opened folder that it was loaded from.
        state: This rank's place in the layout.

    Raises:
        ValueError: A sequence can't be kept in pages, or an option doesn't fit the model.
    """

    def __init__(
        self,
        model: GPT,
        *,
        tokenizer: Tokenizer | None = None,
        ends: Sequence[int] | frozenset[int] = (),
        options: EngineOptions | None = None,
        run: Run | None = None,
        state: ParallelState | None = None,
    ) -> None:
        self.model, self.tokenizer, self.ends = model, tokenizer, frozenset(ends)
        self.options = EngineOptions() if options is None else options
        self._state = state
        if self.options.batch_invariant and (problem := obstacle_of(model, state)):
            raise ValueError(f"batch_invariant=True: {problem}; leave it out")
        vocab_size = model.config.vocab_size if run is None else run.num_tokens
        vocab_size = vocab_size if tokenizer is None else tokenizer.vocab_size
        self._loop = Loop(
            model,
            self.options,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            step=None if run is None else run.step,
            state=state,
        )
        self._weights = Weights(model, self._loop, run, state)
        preprocess = None if run is None else run.pixels
        self._intake = Intake(
            model.config, tokenizer, self.ends, vocab_size=vocab_size, preprocess=preprocess
        )
        self._lock, self._numbers = threading.RLock(), count()

    @classmethod
    def from_folder(
        cls,
        folder: Path | str,
        *,
        state: ParallelState | None = None,
        step: int | None = None,
        dtype: str | None = None,
        adapters: Mapping[str, AdapterSource] | None = None,
        **options: Any,
    ) -> Engine:
        """Load a run of mt-train or a folder of Hugging Face.

        Args:
            folder: The folder; see `load_run`.
            state: This rank's place in a layout of tensor and expert parallelism.
            step: Step of a run's checkpoint; None for the latest.
            dtype: `fp64`, `fp32`, `bf16` or `fp16`; by default fp32 on a CPU and bf16 on a GPU.
            adapters: LoRA adapters by name; see `load_adapter`.
            options: Fields of `EngineOptions`.

        Raises:
            RunError: The folder is neither, has no committed checkpoint, or its parts don't fit.
        """
        chosen = EngineOptions(**options)
        if state is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            state = ParallelState(ParallelLayout(), device=device)
        with open_run(Path(folder), step) as own, same_run(own, state) as run:
            engine = cls.from_run(run, state, chosen, dtype=dtype)
        for name, source in (adapters or {}).items():
            engine.load_adapter(name, source)
        return engine

    @classmethod
    def from_run(
        cls,
        run: Run,
        state: ParallelState,
        options: EngineOptions,
        **how: Any,
    ) -> Engine:
        """Load an opened run; see `from_folder`.

        Args:
            run: The run.
            state: This rank's place in a layout of tensor and expert parallelism.
            options: Sizes and switches.
            how: `dtype`, `ema` and `kernels`; see `load_run`.
        """
        found = {"tokenizer": run.own_tokenizer, "ends": run.ends}
        model, options = loaded_model(run, state, options, how), with_draft(options, state, how)
        return cls(model, options=options, run=run, state=state, **found)

    @property
    def batch_invariant(self) -> bool:
        """Whether a token has the same bits whatever else is in its pass."""
        return self.model.shard.kernels.is_invariant

    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling | Sequence[Sampling] | None = None,
        images: Images = None,
        adapter: AdapterNames = None,
    ) -> list[Completion]:
        """Continue prompts.

        Args:
            prompts: A text or a list of tokens, or a list of these.
            sampling: How to choose tokens, for all prompts or for each.
            images: For each prompt the images that its image tokens stand for, as pixel values
                [C, H, W]; None for no images.
            adapter: Name of the adapter, for all prompts or for each; None for none.

        Returns:
            The continuations in the order of the prompts; n of one follow one another.

        Raises:
            PromptError: The model can't continue a prompt.
            LogitsError: The scores of one have NaN, or no finite maximum.
        """
        with self._submitted(prompts, sampling, images, adapter) as answers:
            while not all_ended(answers):
                self._advance(lambda: all_ended(answers))
            return [completed(each) for each in answers]

    def stream(
        self,
        prompts: Prompts,
        sampling: Sampling | Sequence[Sampling] | None = None,
        images: Images = None,
        adapter: AdapterNames = None,
    ) -> Iterator[Delta]:
        """Continue prompts, and yield the deltas as they come; see `generate`."""
        with self._submitted(prompts, sampling, images, adapter, streams=True) as answers:
            while True:
                yield from news_of(answers)
                if all_ended(answers):
                    return
                self._advance(lambda: any_ready(answers))

    async def agenerate(
        self,
        prompts: Prompts,
        sampling: Sampling | Sequence[Sampling] | None = None,
        images: Images = None,
        adapter: AdapterNames = None,
    ) -> list[Completion]:
        """Continue prompts beside other calls of the event loop; see `generate`."""
        with self._submitted(prompts, sampling, images, adapter) as answers:
            while not all_ended(answers):
                await asyncio.to_thread(self._advance, lambda: all_ended(answers))
            return [completed(each) for each in answers]

    async def astream(
        self,
        prompts: Prompts,
        sampling: Sampling | Sequence[Sampling] | None = None,
        images: Images = None,
        adapter: AdapterNames = None,
    ) -> AsyncIterator[Delta]:
        """Yield the deltas of continuations beside other calls of the event loop."""
        with self._submitted(prompts, sampling, images, adapter, streams=True) as answers:
            while True:
                for delta in news_of(answers):
                    yield delta
                if all_ended(answers):
                    return
                await asyncio.to_thread(self._advance, lambda: any_ready(answers))

    def score(
        self,
        tokens: Sequence[int] | Tensor,
        *,
        prompt: Prompt | None = None,
        images: Sequence[Pixels] = (),
        adapter: str | None = None,
    ) -> Tensor:
        """Return the logprob of each token of a text but the first, by the model's scores.

        Args:
            tokens: The text.
            prompt: Prompt for the encoder, for a model with one. The decoder begins with its
                start, so all tokens have logprobs.
            images: Images among the tokens.
            adapter: Name of the adapter; None for none.

        Shape:
            tokens: [S]. Returns [S - 1], or [S] behind a prompt; fp32.
        """
        whole = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        given = self._intake.text(whole, prompt, images)
        answer = self._new_answer(given, Sampling(max_tokens=0, prompt_logprobs=0), 0, adapter)
        self._loop.arriving.append(answer)
        while not answer.has_ended:
            self._advance(lambda: answer.has_ended)
        return torch.tensor(completed(answer).prompt_logprobs)

    def stats(self) -> dict[str, int]:
        """Return the numbers of blocks and requests now, and of passes and tokens so far."""
        scheduler, pool = self._loop.scheduler, self._loop.pool
        return {
            "blocks": pool.size,
            "free_blocks": pool.free_blocks,
            "cached_blocks": pool.cached_blocks,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting) + len(self._loop.arriving),
            "adapters": len(self._loop.adapters),
            "evictions": scheduler.evictions,
            "prefix_tokens": scheduler.found_tokens,
            "admitted_tokens": scheduler.admitted_tokens,
            **self._loop.counts,
        }

    def load_step(self, step: int | None = None, *, finish: bool = True) -> int | None:
        """Read a newer checkpoint of the run into the live model.

        Args:
            step: Step of the checkpoint; None for the latest.
            finish: Whether running requests first end with the weights that they have. Otherwise
                they go on with the new ones, which compute all of their tokens again.

        Returns:
            The step of the checkpoint.

        Raises:
            ValueError: The engine was not made from a run.
        """
        with self._lock:
            return self._weights.load_step(step, finish=finish)

    def update_weights(
        self, weights: Mapping[str, Tensor], *, step: int | None = None, finish: bool = True
    ) -> None:
        """Copy parameters, for example from a trainer in this process, into the live model.

        Args:
            weights: This rank's parts of parameters by name, of the model's shapes.
            step: Step that made them, for the completions.
            finish: See `load_step`.

        Raises:
            ValueError: The model has no such parameter, or one of another shape.
        """
        with self._lock:
            self._weights.update(weights, step, finish=finish)

    def load_adapter(self, name: str, source: AdapterSource, *, alpha: float | None = None) -> None:
        """Load a LoRA adapter; requests that have begun with one of the same name keep that one.

        Args:
            name: Its name.
            source: A folder of Hugging Face PEFT, or tensors by their names in PEFT; see
                `mt_hf.read_lora`. Under parallelism every rank gives the whole tensors.
            alpha: Products of given tensors are scaled by alpha / rank; by 1 if None.

        Raises:
            ValueError: The adapter is not supported, or a layer of the model takes no such one.
        """
        with self._lock:
            self._loop.adapters.load(name, source, alpha)
            self._loop.drop_unused_adapters()

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter; requests that have begun with it end with it, and then it is freed.

        Raises:
            ValueError: There is no adapter of that name.
        """
        with self._lock:
            self._loop.adapters.remove(name)
            self._loop.drop_unused_adapters()

    def sleep(self) -> None:
        """Free the memory of keys and values; requests wait until `wake`."""
        with self._lock:
            self._weights.sleep()

    def wake(self) -> None:
        """Make the memory of keys and values anew after `sleep`."""
        with self._lock:
            self._weights.wake()

    @contextmanager
    def _submitted(
        self,
        prompts: Prompts,
        sampling: Sampling | Sequence[Sampling] | None,
        images: Images,
        adapter: AdapterNames,
        *,
        streams: bool = False,
    ) -> Iterator[list[Answer]]:
        """Hand requests to the loop; those that have not ended at the block's end are cancelled."""
        given = as_list(prompts)
        if sampling is None or isinstance(sampling, Sampling):
            sampling = [sampling or Sampling()] * len(given)
        if len(sampling) != len(given):
            raise ValueError(f"{len(sampling)} samplings for {len(given)} prompts; give one each")
        answers: list[Answer] = []
        each = images_of_each(images, len(given)), adapter_of_each(adapter, len(given))
        for prompt, how, pictures, name in zip(given, sampling, *each, strict=True):
            begun = self._intake.given(prompt, pictures)
            seed = self._drawn_seed() if how.seed is None else how.seed
            for choice in range(how.n):
                answer = self._new_answer(begun, how, seed, name)
                answer.index, answer.choice, answer.streams = len(answers), choice, streams
                if self.tokenizer is not None and answer.stops is not None:
                    answer.stream = TextStream(self.tokenizer, answer.stops)
                answers.append(answer)
        self._loop.arriving.extend(answers)
        try:
            yield answers
        finally:
            self._cancel(answers)

    def _new_answer(
        self, given: Given, sampling: Sampling, seed: int, adapter: str | None
    ) -> Answer:
        self._loop.adapters.number(adapter)
        answer = self._intake.answer(next(self._numbers), given, sampling, seed)
        answer.adapter = adapter
        self._loop.scheduler.check(answer.request)
        return answer

    def _cancel(self, answers: Sequence[Answer]) -> None:
        """End answers at once, or, while another thread steps, with the next step."""
        self._loop.leaving.extend(each for each in answers if not each.has_ended)
        if self._loop.leaving and self._lock.acquire(blocking=False):
            try:
                self._loop.take_in()
            finally:
                self._lock.release()

    def _drawn_seed(self) -> int:
        """Return a new seed, the same on all ranks."""
        seed = torch.tensor(secrets.randbits(32), device=self._loop.runner.device)
        group = None if self._state is None else self._state.group(WORLD)
        if group is not None:
            dist.broadcast(seed, group=group, group_src=0)
        return int(seed)

    def _advance(self, is_ready: Callable[[], bool]) -> None:
        """Step once, unless another thread's step has made the answers ready."""
        with self._lock:
            if not is_ready():
                self._loop.step()
