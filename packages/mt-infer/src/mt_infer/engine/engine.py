"""The engine: continuations of many prompts at once, each with the same tokens as alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from mt_model import GPT
from mt_parallel_state import ParallelLayout, ParallelState
from mt_tokenizer import Tokenizer
from torch import Tensor

from mt_infer.digests import Identity
from mt_infer.engine.adapters import AdapterSource
from mt_infer.engine.calls import Calls
from mt_infer.engine.handover import Handover
from mt_infer.engine.intake import Intake, Prompt
from mt_infer.engine.loop import Loop
from mt_infer.engine.options import EngineOptions
from mt_infer.engine.ranks import Ranks
from mt_infer.engine.weights import Weights, loaded_model, obstacle_of, with_draft
from mt_infer.loading import Run, open_run, same_run
from mt_infer.sampling import Sampling
from mt_infer.service import Service


class Engine(Calls):
    """A model that continues many prompts at once.

    Its methods may be called from several threads; one of them runs the passes for all. If ranks
    share the model's tensors, experts or layers, the callers are on the first rank, and the other
    ranks call `serve`. Every rank calls `update_weights`, outside of `serve`.

    Args:
        model: The model.
        tokenizer: The tokenizer of its training; None for token lists alone.
        ends: Tokens that end a text.
        options: Sizes and switches.
        run: The opened folder of the model.
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
        if model.config.retro is not None:
            raise ValueError(
                "the model reads neighbours (model.retro), and an engine's pages keep none; use "
                "mt-infer generate --database DB, or mt_infer.Generator with retrieve"
            )
        self.model, self.tokenizer, self.ends = model, tokenizer, frozenset(ends)
        self.options = options or EngineOptions()
        ranks = Ranks(state)
        if self.options.batch_invariant and (problem := obstacle_of(model, ranks)):
            raise ValueError(f"batch_invariant=True: {problem}; leave it out")
        vocab_size = model.config.vocab_size if run is None else run.num_tokens
        vocab_size = vocab_size if tokenizer is None else tokenizer.vocab_size
        how = {"vocab_size": vocab_size, "preprocess": None if run is None else run.pixels}
        intake = Intake(model.config, tokenizer, self.ends, **how)
        loop = Loop(
            model,
            self.options,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            identity=Identity.of_model(model, None) if run is None else Identity.of_run(run),
            intake=intake,
            ranks=ranks,
        )
        super().__init__(intake, loop, ranks)
        self._weights = Weights(model, loop, run, ranks)
        self._handover = Handover(loop, self.options, ranks, self._weights)
        self.run, self.state, self.vocab_size = run, state, vocab_size

    @classmethod
    def from_folder(
        cls,
        folder: Path | str,
        *,
        state: ParallelState | None = None,
        step: int | None = None,
        dtype: str | torch.dtype | None = None,
        adapters: Mapping[str, AdapterSource] | None = None,
        **options: Any,
    ) -> Engine:
        """Load a run of mt-train or a folder of Hugging Face.

        Args:
            folder: The folder; see `load_run`.
            state: This rank's place in a layout of tensor and expert parallelism.
            step: Step of a run's checkpoint; None for the latest.
            dtype: `fp64`, `fp32`, `bf16`, `fp16` or torch's own; by default fp32 on a CPU and bf16
                on a GPU.
            adapters: LoRA adapters by name; see `load_adapter`.
            options: Fields of `EngineOptions`.

        Raises:
            RunError: The folder is neither kind, has no committed checkpoint, or its parts don't
                fit.
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
        """Whether a token has the same bits with any other tokens in its pass."""
        return self.model.shard.kernels.is_invariant

    @property
    def step(self) -> int | None:
        """Step of the weights; None for a folder of Hugging Face."""
        return self.identity.step

    @property
    def identity(self) -> Identity:
        """Step and digest of the weights as one value, for readers during a swap."""
        return self._loop.identity

    @property
    def is_awake(self) -> bool:
        """Whether the engine can make passes; see `sleep`."""
        return self._loop.runner.is_awake

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters."""
        return self._loop.adapters.names

    @property
    def digest(self) -> str:
        """Digest of the weights, in hexadecimal: of their files, or of updated tensors."""
        return self.identity.digest

    def stats(self) -> dict[str, int]:
        """Return the numbers of blocks and requests now, and of passes and tokens so far."""
        return self._loop.stats()

    def load_step(self, step: int | None = None, *, finish: bool = True) -> int | None:
        """Read a newer checkpoint of the run into the live model, and return its step.

        Args:
            step: Step of the checkpoint; None for the latest.
            finish: Whether running requests first end with the old weights. Otherwise, and in a
                sleeping engine, they continue with the new weights, which compute all of their
                tokens again.

        Raises:
            ValueError: The engine was not made from a run.
            RunError: The checkpoint has another model, or values that are not finite. If the
                read has begun, the engine sleeps.
        """
        with self._lock:
            return self._weights.load_step(step, finish=finish)

    def update_weights(
        self, weights: Mapping[str, Tensor], *, step: int | None = None, finish: bool = True
    ) -> None:
        """Copy weights, for example from a trainer in this process, into the live model.

        Args:
            weights: This rank's parts of parameters, and of `mt_model.saved_buffers`, by name, with
                the model's shapes. Weights of quantised layers are rounded to their formats.
            step: Step that made them, for the completions.
            finish: See `load_step`.

        Raises:
            ValueError: The model has no such tensor, or its tensor has another shape.
            QuantizationError: A quantised layer has more than a rounded weight.
        """
        with self._lock:
            self._weights.update(weights, step, finish=finish)

    def load_adapter(self, name: str, source: AdapterSource, *, alpha: float | None = None) -> None:
        """Load a LoRA adapter; running requests keep an older adapter of the same name.

        Args:
            name: Name of the adapter.
            source: A folder of Hugging Face PEFT, which all ranks can read, or tensors by their
                names in PEFT; see `mt_hf.read_lora`.
            alpha: Products of given tensors are scaled by alpha / rank; by 1 if None.

        Raises:
            ValueError: The adapter is not supported, or a layer of the model can't take it.
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
        """Allocate keys and values again after `sleep`, and bring the weights back."""
        with self._lock:
            self._ranks.do(self._weights.wake)

    def hand_over(
        self, prompt: Prompt, *, adapter: str | None = None, service: Service | None = None
    ) -> bytes:
        """Compute a prompt, and return the keys and values of its full blocks for another engine.

        Args:
            prompt: See `generate`; without images.
            adapter: Name of the adapter; the other engine has the same one under this name.
            service: See `generate`; the blocks are for its caller.

        Returns:
            The content for `take_over` of an engine with the same model, weights, dtype and
            block_size, for any tp and pp; models with recurrent layers need the same tp.

        Raises:
            ValueError: The engine has no prefix cache, the model has an encoder, or keys depend on
                the length of the text.
        """
        self._handover.check()
        service, tokens = service or Service(), self._intake.given(prompt).tokens
        how = Sampling(max_tokens=0, seed=0)
        self.generate([tokens], how, adapter=adapter, service=service)
        with self._lock:
            return self._handover.give(tokens, adapter=adapter, caller=service.caller)

    def take_over(self, content: bytes) -> int:
        """Keep blocks from `hand_over`; a request with the same prompt then starts after them.

        Blocks are kept like blocks of earlier requests, as far as there is room.

        Args:
            content: The content; it must come from a trusted engine.

        Returns:
            The number of tokens with kept keys and values.

        Raises:
            ValueError: The content is not from `hand_over`, or from an engine with other blocks.
        """
        with self._lock:
            self._loop.runner.check_awake()
            return self._handover.take(content)

    def serve(self) -> None:
        """Take part in the first rank's calls until it closes; the other ranks call this method.

        Raises:
            RankError: Another rank has failed.
        """
        with self._lock:
            if not self._ranks.is_first:
                self._weights.follow("close")

    def close(self) -> None:
        """Let `serve` return on the other ranks; the first rank calls it when it has no requests.

        As a context manager, the engine calls `close` at the end of the block on the first rank.
        """
        with self._lock:
            if self._ranks.is_first and not self._ranks.has_failed:
                self._ranks.tell("close")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
