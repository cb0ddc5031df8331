"""An engine in the server's process: one thread makes the passes for all requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mt_files import to_plain
from mt_tokenizer import Tokenizer

from mt_infer.backends.backend import EngineDownError, Facts, Job, Picture, Pooling
from mt_infer.completion import Delta
from mt_infer.engine.answer import Answer, all_ended, any_ready, news_of
from mt_infer.engine.engine import Engine

_MOMENT_S = 0.005


@dataclass(eq=False)
class _Reader:
    """A reader that waits for the deltas of answers."""

    answers: list[Answer]
    loop: asyncio.AbstractEventLoop
    has_news: asyncio.Event = field(default_factory=asyncio.Event)


class LocalEngine:
    """A `Backend` of an engine in this process.

    Args:
        engine: The engine; nobody else makes its passes.
        name: Name of the model.
    """

    def __init__(self, engine: Engine, *, name: str = "model") -> None:
        self.engine, self._name = engine, name
        self._digests: dict[int | None, str] = {}
        self._readers: set[_Reader] = set()
        self._is_wanted, self._is_closed, self._is_asleep = threading.Event(), False, False
        self._error: BaseException | None = None
        self._may_begin, self._swaps = asyncio.Event(), asyncio.Lock()
        self._may_begin.set()
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    @property
    def facts(self) -> Facts:
        """The model and its engine."""
        engine, config = self.engine, self.engine.model.config
        identity = engine.identity
        self._digests[identity.step] = identity.digest
        kept = engine.options.kv_cache_dtype
        cache = kept if isinstance(kept, str) else "own scales"
        sizes = {} if engine.state is None else {n: engine.state.size(n) for n in ("tp", "pp")}
        return Facts(
            model=self._name,
            vocab_size=engine.vocab_size,
            max_sequence_length=config.max_sequence_length,
            dtype=str(next(engine.model.parameters()).dtype).removeprefix("torch."),
            layout="-".join(f"{name}{size}" for name, size in sizes.items()) or "tp1-pp1",
            kernels={**to_plain(engine.model.shard.kernels), "kv_cache": cache},
            step=identity.step,
            digests=dict(self._digests),
            adapters=self.engine.adapters,
            has_encoder=bool(config.encoder_layers),
            takes_images=config.images is not None,
            max_batch=engine.options.max_batch,
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer."""
        return self.engine.tokenizer

    @property
    def folder(self) -> Path | None:
        """The folder with the model's chat template."""
        return None if self.engine.run is None else self.engine.run.chat_folder

    @property
    def is_ready(self) -> bool:
        """Whether requests would be served now."""
        return self._error is None and not self._is_asleep and not self._is_closed

    @property
    def is_alive(self) -> bool:
        """Whether the thread makes passes."""
        return self._error is None

    @property
    def has_lost_weights(self) -> bool:
        """Whether weights were read only in part, so that the engine sleeps."""
        return not self._is_asleep and not self.engine.is_awake

    async def stream(self, job: Job) -> AsyncGenerator[Delta, None]:
        """Continue prompts; see `Backend.stream`."""
        self._check_ready()
        given = None if job.images is None else [list(map(_decoded, each)) for each in job.images]
        asked = list(map(list, job.prompts)), job.sampling, given
        how = {"adapter": job.adapter, "service": job.service}
        answers = await asyncio.to_thread(self.engine.answers, *asked, **how)
        await self._may_begin.wait()
        reader = _Reader(answers, asyncio.get_running_loop())
        try:
            with self.engine.submitted(answers):
                self._readers.add(reader)
                self._is_wanted.set()
                while True:
                    has_ended = all_ended(answers)  # what comes meanwhile is news of the next turn
                    for delta in news_of(answers):
                        yield delta
                    if has_ended:
                        return
                    if self._error is not None:  # it may have come before there was a reader
                        raise EngineDownError(f"the engine failed: {self._error}")
                    await reader.has_news.wait()
                    reader.has_news.clear()
        finally:
            self._readers.discard(reader)
            self._is_wanted.set()  # the thread may have to let cancelled requests go

    async def embed(
        self, prompts: Sequence[Sequence[int]], pooling: Pooling = "last"
    ) -> list[list[float]]:
        """Return a vector for each prompt; other requests have their passes between two prompts."""
        self._check_ready()
        found = []
        for prompt in prompts:
            vectors = await asyncio.to_thread(self.engine.embed, list(prompt), pooling=pooling)
            found += vectors.tolist()
        return found

    async def hand_over(self, job: Job) -> bytes:
        """Return the keys and values of the only prompt's full blocks."""
        self._check_ready()
        (prompt,), how = job.prompts, {"adapter": job.adapter, "service": job.service}
        return await asyncio.to_thread(self.engine.hand_over, list(prompt), **how)

    async def take_over(self, content: bytes) -> int:
        """Keep blocks of another engine."""
        self._check_ready()
        return await asyncio.to_thread(self.engine.take_over, content)

    async def stats(self) -> dict[str, int]:
        """Return the counts of `Engine.stats`."""
        return self.engine.stats()

    async def load_step(self, step: int | None = None) -> int | None:
        """Read a checkpoint of the run.

        Running requests end with their current weights, and new ones wait meanwhile.
        """
        async with self._swaps:
            self._may_begin.clear()
            try:
                # The engine would wait too, but without news for those who read.
                while not all(all_ended(each.answers) for each in self._readers):
                    await asyncio.sleep(_MOMENT_S)
                return await asyncio.to_thread(self.engine.load_step, step)
            finally:
                self._may_begin.set()
                self._is_wanted.set()

    async def sleep(self, level: int = 1) -> None:
        """Free memory until `wake`."""
        self._is_asleep = True
        await asyncio.to_thread(self.engine.pause)
        await asyncio.to_thread(self.engine.sleep, level)

    async def wake(self) -> None:
        """Serve again."""
        await asyncio.to_thread(self.engine.wake)
        self.engine.resume()
        self._is_asleep = False
        self._is_wanted.set()

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter."""
        await asyncio.to_thread(self.engine.load_adapter, name, folder)

    async def remove_adapter(self, name: str) -> None:
        """Forget an adapter."""
        await asyncio.to_thread(self.engine.remove_adapter, name)

    async def close(self) -> None:
        """End the engine's thread."""
        self._is_closed = True
        self._is_wanted.set()
        await asyncio.to_thread(self._thread.join)

    def _check_ready(self) -> None:
        if self._is_asleep:
            raise EngineDownError("the model sleeps; try again when it is awake")
        if not self.is_ready:
            raise EngineDownError(f"the engine failed: {self._error}")

    def _serve(self) -> None:
        """Make passes while there are requests; an error outside any request ends the engine."""
        try:
            while not self._is_closed:
                self._is_wanted.wait()
                self._is_wanted.clear()
                while self.engine.advance() and not self._is_closed:
                    self._tell()
                self._tell()
        except BaseException as error:  # noqa: BLE001 - the readers raise it
            self._error = error
            self._tell()

    def _tell(self) -> None:
        """Wake the readers with news."""
        ready = [each for each in list(self._readers) if self._error or any_ready(each.answers)]
        for each in ready:
            with suppress(RuntimeError):  # its loop has ended
                each.loop.call_soon_threadsafe(each.has_news.set)


def _decoded(picture: Picture) -> object:
    """Return a picture as a pillow image, for the model's preprocessing."""
    from PIL import Image

    return Image.frombytes("RGB", (picture.width, picture.height), picture.rgb)
