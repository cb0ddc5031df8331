"""The engine: continuations of many prompts at once, each with the tokens it would have alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Self, Unpack

import torch
from mt_model import GPT
from mt_parallel_state import ParallelLayout, ParallelState
from mt_tokenizer import Tokenizer
from torch import Tensor

from mt_infer.completion import Completion, Delta
from mt_infer.engine.adapters import AdapterSource
from mt_infer.engine.answer import Answer, all_ended, any_ready, completed, news_of
from mt_infer.engine.intake import CallOptions, Intake, Prompt, Prompts, Samplings, as_list
from mt_infer.engine.loop import Loop
from mt_infer.engine.options import EngineOptions
from mt_infer.engine.ranks import Ranks
from mt_infer.engine.weights import Weights, loaded_model, obstacle_of, with_draft
from mt_infer.images import Images, Pixels
from mt_infer.loading import Run, open_run, same_run
from mt_infer.sampling import Sampling

_MOMENT_S = 0.02


class Engine:
    """A model that continues many prompts at once.

    Its methods may be called from several threads; one of them runs the passes for all. Where
    ranks share the model's tensors, experts or layers, callers are the first rank's, and the others
    call `serve`. `update_weights` is called by every rank, outside of `serve`.

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
        self.options = options or EngineOptions()
        self._ranks = ranks = Ranks(state)
        if self.options.batch_invariant and (problem := obstacle_of(model, ranks)):
            raise ValueError(f"batch_invariant=True: {problem}; leave it out")
        vocab_size = model.config.vocab_size if run is None else run.num_tokens
        vocab_size = vocab_size if tokenizer is None else tokenizer.vocab_size
        how = {"vocab_size": vocab_size, "preprocess": None if run is None else run.pixels}
        self._intake = Intake(model.config, tokenizer, self.ends, **how)
        self._loop = Loop(
            model,
            self.options,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            step=None if run is None else run.step,
            intake=self._intake,
            ranks=ranks,
        )
        self._weights = Weights(model, self._loop, run, ranks)
        self.run, self.state, self.vocab_size = run, state, vocab_size
        self._lock, self._goes_on = self._loop.lock, threading.Event()
        self._goes_on.set()

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
            engine._loop.load_adapter(name, source, None)
        return engine

    @classmethod
    def from_run(cls, run: Run, state: ParallelState, options: EngineOptions, **how: Any) -> Engine:
        """Load an opened run; see `from_folder`.

        Args:
            run: The run.
            state: This rank's place in a layout of tensor and expert parallelism.
            options: Sizes and switches.
            how: `dtype`, `ema` and `kernels`; see `load_run`.
        """
        found = {"tokenizer": run.own_tokenizer, "ends": run.ends}
        model, options = loaded_model(run, state, options, how), with_draft(options, state, how)
        made = cls(model, options=options, run=run, state=state, **found)
        made._weights.ema = how.get("ema", False)
        return made

    @property
    def batch_invariant(self) -> bool:
        """Whether a token has the same bits whatever else is in its pass."""
        return self.model.shard.kernels.is_invariant

    @property
    def step(self) -> int | None:
        """Step of the weights; None for a folder of Hugging Face."""
        return self._loop.step_of_weights

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters."""
        return self._loop.adapters.names

    @property
    def digest(self) -> str:
        """Digest of the weights, in hexadecimal: of their files, or of updated tensors."""
        return self._weights.digest

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
            images: For each prompt the images that its image tokens stand for, as pixel values
                [C, H, W]; None for no images.
            how: `adapter`, its name, for all prompts or for each, and `service`, a `Service`.

        Returns:
            The continuations in the order of the prompts; n of one follow one another.

        Raises:
            PromptError: The model can't continue a prompt.
            LogitsError: The scores of one have NaN, or no finite maximum.
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
        """Hand answers in, which calls of `advance` fill; the block's end cancels the others."""
        return self._loop.submitted(answers)

    def advance(self) -> bool:
        """Serve all requests for one pass, and return whether some go on."""
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
        how = Sampling(max_tokens=0, prompt_logprobs=0, seed=0)
        done = self._finished([self._intake.answer(given, how, adapter)])[0]
        return torch.tensor(done.prompt_logprobs)

    def embed(self, prompts: Prompts, *, pooling: Literal["last", "mean"] = "last") -> Tensor:
        """Return a vector for each prompt, from the features of which the head makes its scores.

        Args:
            prompts: See `generate`.
            pooling: `last` takes the features of the last token, which has seen all others, and
                `mean` the mean over the tokens.

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

    def stats(self) -> dict[str, int]:
        """Return the numbers of blocks and requests now, and of passes and tokens so far."""
        return self._loop.stats()

    def load_step(self, step: int | None = None, *, finish: bool = True) -> int | None:
        """Read a newer checkpoint of the run into the live model, and return its step.

        Args:
            step: Step of the checkpoint; None for the latest.
            finish: Whether running requests first end with the weights that they have. Otherwise,
                and in an engine that sleeps, they go on with the new ones, which compute all of
                their tokens again.

        Raises:
            ValueError: The engine was not made from a run.
            RunError: The checkpoint has another model, or values that are not finite. The engine
                sleeps if it has begun to read.
        """
        with self._lock:
            return self._weights.load_step(step, finish=finish)

    def update_weights(
        self, weights: Mapping[str, Tensor], *, step: int | None = None, finish: bool = True
    ) -> None:
        """Copy weights, for example from a trainer in this process, into the live model.

        Args:
            weights: This rank's parts of parameters, and of `mt_model.saved_buffers`, by name, of
                the model's shapes. Weights of quantised layers are rounded to their formats.
            step: Step that made them, for the completions.
            finish: See `load_step`.

        Raises:
            ValueError: The model has no such tensor, or one of another shape.
            QuantizationError: A quantised layer has more than a rounded weight.
        """
        with self._lock:
            self._weights.update(weights, step, finish=finish)

    def load_adapter(self, name: str, source: AdapterSource, *, alpha: float | None = None) -> None:
        """Load a LoRA adapter; running requests keep an older adapter of the same name.

        Args:
            name: Its name.
            source: A folder of Hugging Face PEFT, which all ranks can read, or tensors by their
                names in PEFT; see `mt_hf.read_lora`.
            alpha: Products of given tensors are scaled by alpha / rank; by 1 if None.

        Raises:
            ValueError: The adapter is not supported, or a layer of the model takes no such one.
        """
        with self._lock:
            source = str(source) if isinstance(source, Path) else source
            self._ranks.lead(self._loop.load_adapter, name=name, source=source, alpha=alpha)

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter; its memory is freed when no running request uses it.

        Raises:
            ValueError: There is no adapter of that name.
        """
        with self._lock:
            self._ranks.lead(self._loop.remove_adapter, name=name)

    def sleep(self, level: int = 1) -> None:
        """Free memory of the device until `wake`; running requests may keep theirs on the host.

        A call that would make a pass raises RuntimeError meanwhile, or waits if `pause` came first.

        Args:
            level: 1 frees the keys and values, 2 moves the weights to host memory too.
        """
        if level not in (1, 2):
            raise ValueError(f"level={level}: use 1 to free keys and values, or 2 for weights too")
        with self._lock:
            self._ranks.do(self._weights.sleep, level=level)

    def wake(self) -> None:
        """Make the memory of keys and values anew after `sleep`, and bring the weights back."""
        with self._lock:
            self._ranks.do(self._weights.wake)

    def pause(self) -> None:
        """Let the pass that runs end, and make none until `resume`.

        Requests keep their blocks, and calls that wait for them go on waiting.
        """
        self._goes_on.clear()
        with self._lock:
            pass

    def resume(self) -> None:
        """Go on after `pause`."""
        self._goes_on.set()

    def serve(self) -> None:
        """Do what the first rank's calls need, until it closes; the other ranks call it.

        Raises:
            RankError: Another rank has failed.
        """
        with self._lock:
            if not self._ranks.is_first:
                self._weights.follow("close")

    def close(self) -> None:
        """Let `serve` return on the other ranks; the first rank calls it when it has no requests.

        As a context manager, the engine calls it at the end of the block on the first rank.
        """
        with self._lock:
            if self._ranks.is_first and not self._ranks.has_failed:
                self._ranks.tell("close")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finished(self, answers: list[Answer]) -> list[Completion]:
        """Hand requests in, step until all have ended, and return their completions."""
        with self._loop.submitted(answers):
            while not all_ended(answers):
                self._advance(lambda: all_ended(answers))
        return [completed(each) for each in answers]

    def _advance(self, is_ready: Callable[[], bool]) -> None:
        """Step once, unless another thread's step has made the answers ready.

        While the engine is paused it waits only for a moment, so that the threads of an event loop
        are free for those who resume it.
        """
        if not self._goes_on.wait(_MOMENT_S):
            return
        with self._lock:
            if self._goes_on.is_set() and not is_ready():
                self._loop.step()
