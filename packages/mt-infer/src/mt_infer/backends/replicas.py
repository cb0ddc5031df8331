"""Several engines of one server: each request goes to one engine."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from mt_tokenizer import Tokenizer

from mt_infer.backends.backend import (
    Backend,
    EngineDownError,
    EngineFailedError,
    Facts,
    Job,
    Pooling,
)
from mt_infer.completion import Delta
from mt_infer.sampling import Sampling

_BLOCK = 16  # tokens of a key
_MOST_KEYS = 1 << 16


@dataclass(eq=False, kw_only=True)
class _Replica:
    """An engine, with keys of the prompts in its cache.

    Attributes:
        backend: The engine.
        load: Number of current continuations.
        known: Keys of the beginnings of recent prompts, the latest last.
    """

    backend: Backend
    load: int = 0
    known: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def matched(self, keys: Sequence[bytes]) -> int:
        """Return the number of a prompt's first blocks that the engine has seen."""
        return next((i for i, key in enumerate(keys) if key not in self.known), len(keys))

    def note(self, keys: Iterable[bytes]) -> None:
        """Remember a prompt."""
        for key in keys:
            self.known[key] = None
            self.known.move_to_end(key)
        while len(self.known) > _MOST_KEYS:
            self.known.popitem(last=False)


class Replicas:
    """A `Backend` of several engines of one model.

    A request goes to the engine that has seen the longest beginning of its prompt, unless that
    engine has a full batch and another one has room; otherwise to the one with the least work. A
    request without a token yet goes to another engine if its own ends.

    Engines for prompts compute the blocks of a long prompt and hand them over, so that the prompt
    does not delay other answers. If such an engine ends or refuses, the answering engine computes
    the prompt itself.

    Args:
        backends: The engines.
        prefill: Engines for prompts alone; they may have other layouts.
    """

    def __init__(self, backends: Sequence[Backend], *, prefill: Sequence[Backend] = ()) -> None:
        self._replicas = [_Replica(backend=each) for each in backends]
        self._prefill = [_Replica(backend=each) for each in prefill]

    @property
    def facts(self) -> Facts:
        """The model, and the room of all engines; the step is that of a serving engine."""
        ready = [each for each in self._replicas if each.backend.is_ready]
        first, *others = (each.backend.facts for each in ready or self._replicas)
        digests = dict(first.digests)
        for facts in others:
            digests |= facts.digests
        batch = first.max_batch + sum(each.max_batch for each in others)
        return replace(first, digests=digests, max_batch=batch)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer."""
        return self._replicas[0].backend.tokenizer

    @property
    def folder(self) -> Path | None:
        """The folder with the model's chat template."""
        return self._replicas[0].backend.folder

    @property
    def is_ready(self) -> bool:
        """Whether at least one engine serves."""
        return any(each.backend.is_ready for each in self._replicas)

    async def stream(self, job: Job) -> AsyncGenerator[Delta, None]:
        """Continue prompts on one engine; see `Backend.stream`."""
        salt = f"{job.adapter}/{job.service.caller}"
        keys = [] if job.images else keys_of(job.prompts[0], salt)
        tried: list[_Replica] = []
        while True:
            replica = _chosen(self._replicas, keys, tried)
            count, has_begun = len(job.prompts) * job.sampling.n, False
            replica.load += count
            try:
                if keys and replica.matched(keys) < len(keys):
                    await self._prefilled(replica, job)
                replica.note(keys)
                async with aclosing(replica.backend.stream(job)) as deltas:
                    async for delta in deltas:
                        has_begun = True
                        yield delta
            except EngineDownError:
                replica.known.clear()
                tried.append(replica)
                others = [each for each in self._replicas if each not in tried]
                if has_begun or not any(each.backend.is_ready for each in others):
                    raise
            else:
                return
            finally:
                replica.load -= count

    async def embed(
        self, prompts: Sequence[Sequence[int]], pooling: Pooling = "last"
    ) -> list[list[float]]:
        """Return a vector for each prompt, by one engine."""
        return await _chosen(self._replicas, [], []).backend.embed(prompts, pooling)

    async def hand_over(self, job: Job) -> bytes:
        """Return the keys and values of the only prompt's full blocks, from one engine."""
        return await _chosen(self._prefill or self._replicas, [], []).backend.hand_over(job)

    async def take_over(self, content: bytes) -> int:
        """Keep blocks of another engine in all engines."""
        return min([await each.backend.take_over(content) for each in self._replicas])

    async def stats(self) -> dict[str, int]:
        """Return the sums of all engines' counts."""
        ready = [each for each in self._all if each.backend.is_ready]
        found = await asyncio.gather(*(each.backend.stats() for each in ready))
        return dict(sum(map(Counter, found), Counter()))

    async def load_step(self, step: int | None = None) -> int | None:
        """Read a checkpoint, one engine after the other, so that the others serve meanwhile."""
        for each in self._all:
            step = await each.backend.load_step(step)
        return step

    async def sleep(self, level: int = 1) -> None:
        """Free memory of all engines."""
        await asyncio.gather(*(each.backend.sleep(level) for each in self._all))

    async def wake(self) -> None:
        """Serve again."""
        await asyncio.gather(*(each.backend.wake() for each in self._all))

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load an adapter into all engines."""
        for each in self._all:
            await each.backend.load_adapter(name, folder)

    async def remove_adapter(self, name: str) -> None:
        """Forget an adapter in all engines."""
        for each in self._all:
            await each.backend.remove_adapter(name)

    async def close(self) -> None:
        """End all engines."""
        await asyncio.gather(*(each.backend.close() for each in self._all))

    @property
    def _all(self) -> list[_Replica]:
        return [*self._replicas, *self._prefill]

    async def _prefilled(self, replica: _Replica, job: Job) -> None:
        """Let an engine for prompts, if one is ready, compute the first prompt for a replica."""
        if not any(each.backend.is_ready for each in self._prefill):
            return
        helper = _chosen(self._prefill, [], [])
        reading = replace(job, prompts=job.prompts[:1], sampling=Sampling(max_tokens=0, seed=0))
        helper.load += 1
        try:
            # This can be cancelled, and then the blocks are at hand.
            async with aclosing(helper.backend.stream(reading)) as deltas:
                async for _ in deltas:
                    pass
            content = await helper.backend.hand_over(reading)
        except (EngineDownError, EngineFailedError, ValueError):
            return
        finally:
            helper.load -= 1
        with suppress(ValueError):  # they may be of two steps for a moment
            await replica.backend.take_over(content)


def _chosen(
    replicas: Sequence[_Replica], keys: Sequence[bytes], tried: Sequence[_Replica]
) -> _Replica:
    """Return the engine for a prompt.

    Args:
        replicas: The engines.
        keys: Keys of the prompt's beginnings.
        tried: Engines that failed on this request.

    Raises:
        EngineDownError: No engine is ready.
    """
    ready = [each for each in replicas if each.backend.is_ready and each not in tried]
    if not ready:
        raise EngineDownError("no engine is ready; try again later")
    idlest = min(ready, key=lambda each: (each.load, len(each.known)))
    known = max(ready, key=lambda each: (each.matched(keys), -each.load))
    is_full = known.load >= known.backend.facts.max_batch > idlest.load
    return idlest if is_full or not known.matched(keys) else known


def keys_of(tokens: Sequence[int], salt: str) -> list[bytes]:
    """Return the keys of a prompt's beginnings, one for each full block of tokens.

    Args:
        tokens: The prompt.
        salt: Everything else that the cache depends on.
    """
    key, found = salt.encode(errors="surrogatepass"), list[bytes]()
    codes = np.asarray(tokens, dtype="<i8").tobytes()
    for start in range(0, len(tokens) // _BLOCK * _BLOCK, _BLOCK):
        block = codes[8 * start : 8 * (start + _BLOCK)]
        key = hashlib.blake2b(key + block, digest_size=16).digest()
        found.append(key)
    return found
