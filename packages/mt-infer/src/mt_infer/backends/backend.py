"""The interface of an engine for the HTTP process; the engine may run in another process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from mt_tokenizer import Tokenizer

from mt_infer.completion import Delta
from mt_infer.sampling import Sampling
from mt_infer.service import Service

Pooling = Literal["last", "mean"]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A decoded image, before the model's preprocessing.

    Attributes:
        width: Number of columns.
        height: Number of rows.
        rgb: Three bytes for each pixel, row by row.
    """

    width: int
    height: int
    rgb: bytes


@dataclass(frozen=True, kw_only=True)
class Job:
    """Prompts to continue.

    Attributes:
        prompts: Tokens of each prompt.
        sampling: How to choose tokens; `n` continuations of a prompt follow one another.
        images: Images of each prompt, in the order of their tokens; None if no prompt has images.
        adapter: Name of the adapter.
        service: Priority, deadline and caller.
    """

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    images: Sequence[Sequence[Picture]] | None = None
    adapter: str | None = None
    service: Service = field(default_factory=Service)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a model and its engine that clients may know.

    Attributes:
        model: Name of the model.
        vocab_size: Number of tokens to choose from.
        max_sequence_length: Largest number of tokens of a prompt and its answer.
        dtype: Dtype of the weights.
        layout: Ranks that share the model.
        kernels: Kernel of each operation, and the format of cached keys and values.
        step: Step of the weights; None for a folder of Hugging Face.
        digests: Digest of the weights of each served step.
        adapters: Names of the adapters.
        has_encoder: Whether an encoder reads the prompts.
        takes_images: Whether prompts may have images.
        max_batch: Largest number of requests in a pass.
    """

    model: str
    vocab_size: int
    max_sequence_length: int
    dtype: str
    layout: str
    kernels: Mapping[str, str] = field(default_factory=dict)
    step: int | None = None
    digests: Mapping[int | None, str] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()
    has_encoder: bool = False
    takes_images: bool = False
    max_batch: int = 64

    @property
    def digest(self) -> str:
        """Digest of the currently served weights."""
        return self.digests[self.step]

    def fingerprint(self, step: int | None) -> str:
        """Return the `system_fingerprint` of an answer from a step's weights."""
        number = "" if step is None else f"step{step}-"
        return f"mt-{self.digests[step][:16]}-{number}{self.dtype}-{self.layout}"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The model and options that an engine's process loads.

    Attributes:
        folder: The run, or the folder of Hugging Face.
        name: Name of the model.
        step: Step of a run's checkpoint; None for the latest.
        dtype: See `Engine.from_folder`.
        follow: Whether newer steps are loaded as they are committed.
        device: Number of the GPU, or of the group of GPUs if several ranks share the model; after
            the last one the count begins at 0 again.
        nproc: Number of ranks that share the model.
        pp: Number of pipeline stages; `nproc / pp` ranks share a stage by tensor parallelism.
        adapters: Folders of adapters by name.
        options: Fields of `EngineOptions`.
    """

    folder: str
    name: str
    step: int | None = None
    dtype: str | None = None
    follow: bool = False
    device: int = 0
    nproc: int = 1
    pp: int = 1
    adapters: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


class EngineDownError(RuntimeError):
    """The engine's process has ended, or does not answer; a new process is started."""


class EngineFailedError(RuntimeError):
    """The engine failed for one request, and serves others."""


class Backend(Protocol):
    """An engine for a server, on one event loop.

    A ValueError is the caller's mistake, an `EngineDownError` says to try again later, and
    an `EngineFailedError`, or any other, ends one request.
    """

    @property
    def facts(self) -> Facts:
        """The model and its engine."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None for a model that takes only token lists."""
        ...

    @property
    def folder(self) -> Path | None:
        """The folder with the model's chat template; None for a model without a folder."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether the engine can serve requests now."""
        ...

    def stream(self, job: Job) -> AsyncGenerator[Delta, None]:
        """Continue prompts, and yield the deltas as they come; closing it cancels the requests.

        The last delta of each continuation has its completion.
        """
        ...

    async def embed(
        self, prompts: Sequence[Sequence[int]], pooling: Pooling = "last"
    ) -> list[list[float]]:
        """Return a vector for each prompt; see `Engine.embed`."""
        ...

    async def hand_over(self, job: Job) -> bytes:
        """Return the keys and values of the only prompt's full blocks; see `Engine.hand_over`."""
        ...

    async def take_over(self, content: bytes) -> int:
        """Keep blocks of another engine, and return their tokens; see `Engine.take_over`."""
        ...

    async def stats(self) -> dict[str, int]:
        """Return the counts of `Engine.stats`."""
        ...

    async def load_step(self, step: int | None = None) -> int | None:
        """Read a checkpoint of the run, the latest if None, and return its step."""
        ...

    async def sleep(self, level: int = 1) -> None:
        """Free memory until `wake`; see `Engine.sleep`. Requests wait, and new ones are refused."""
        ...

    async def wake(self) -> None:
        """Serve again after `sleep`."""
        ...

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter from a folder of Hugging Face PEFT."""
        ...

    async def remove_adapter(self, name: str) -> None:
        """Forget an adapter."""
        ...

    async def close(self) -> None:
        """End the engine."""
        ...
