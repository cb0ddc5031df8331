"""The engine in a separate process, which is watched and restarted."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from mt_files import UserError
from mt_tokenizer import Tokenizer, load_tokenizer

from mt_infer.backends.backend import EngineDownError, Facts, Job, Pooling, Setup
from mt_infer.backends.channel import Channel
from mt_infer.backends.wire import next_message
from mt_infer.client import KEY_VARIABLE
from mt_infer.completion import Delta
from mt_infer.message import pack

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 30.0
_SILENT_S = 60.0
_END_S = 5.0
# glibc gives the memory of a pass's tensors back and takes it again in each operation, where a heap
# happens to end among them: 900,000 page faults in 32 passes, which then took 1.6 times as long.
_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(512 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
_log = logging.getLogger("mt_infer.server")


class EngineStartError(UserError):
    """The engine's process could not load the model."""


class EngineProcess:
    """A `Backend` whose engine is another process; `start` it first.

    If the process ends, or is silent for a minute, its requests end with `EngineDownError`, and a
    new process is started after a wait that doubles with each failure.

    Args:
        setup: The model and options to load.
        max_stream_bytes: Largest number of bytes that may wait for the reader of a stream; with
            more the stream fails.
    """

    def __init__(self, setup: Setup, *, max_stream_bytes: int = 1 << 20) -> None:
        self._setup, self._max_stream_bytes = setup, max_stream_bytes
        self._process: asyncio.subprocess.Process | None = None
        self._channel: Channel | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._facts: Facts | None = None
        self._tokenizer: Tokenizer | None = None
        self._folder: Path | None = None
        self._is_asleep = False

    @property
    def facts(self) -> Facts:
        """The model and its engine."""
        assert self._facts is not None, "start() comes first"  # noqa: S101
        return self._facts

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def folder(self) -> Path | None:
        """The folder with the model's chat template."""
        return self._folder

    @property
    def is_ready(self) -> bool:
        """Whether requests would be served now."""
        return self._channel is not None and self._channel.is_open and not self._is_asleep

    @property
    def pid(self) -> int | None:
        """Number of the process; None without a process."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process and wait until it has loaded the model.

        Raises:
            EngineStartError: The process can't load the model.
        """
        channel = await self._started()
        self._watcher = asyncio.create_task(self._watch(channel))

    async def stream(self, job: Job) -> AsyncGenerator[Delta, None]:
        """Continue prompts; see `Backend.stream`."""
        if self._is_asleep:
            raise EngineDownError("the model sleeps; try again when it is awake")
        async with aclosing(self._running.stream("stream", job=job)) as messages:
            async for each in messages:
                if "delta" in each:
                    yield each["delta"]

    async def embed(
        self, prompts: Sequence[Sequence[int]], pooling: Pooling = "last"
    ) -> list[list[float]]:
        """Return a vector for each prompt."""
        given = [list(each) for each in prompts]
        return await self._running.call("embed", prompts=given, pooling=pooling)

    async def hand_over(self, job: Job) -> bytes:
        """Return the keys and values of the only prompt's full blocks."""
        return await self._running.call("hand_over", job=job)

    async def take_over(self, content: bytes) -> int:
        """Keep blocks of another engine."""
        return await self._running.call("take_over", content=content)

    async def stats(self) -> dict[str, int]:
        """Return the counts of `Engine.stats`."""
        return await self._running.call("stats")

    async def load_step(self, step: int | None = None) -> int | None:
        """Read a checkpoint of the run; a restarted process reads it too."""
        found = await self._running.call("load_step", step=step)
        self._setup = replace(self._setup, step=step)
        return found

    async def sleep(self, level: int = 1) -> None:
        """Free memory until `wake`."""
        await self._running.call("sleep", level=level)
        self._is_asleep = True

    async def wake(self) -> None:
        """Serve again."""
        await self._running.call("wake")
        self._is_asleep = False

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter; a restarted process loads it too."""
        await self._running.call("load_adapter", name=name, folder=folder)
        self._setup = replace(self._setup, adapters=self._setup.adapters | {name: folder})

    async def remove_adapter(self, name: str) -> None:
        """Forget an adapter."""
        await self._running.call("remove_adapter", name=name)
        left = {key: folder for key, folder in self._setup.adapters.items() if key != name}
        self._setup = replace(self._setup, adapters=left)

    async def close(self) -> None:
        """End the process."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._end()

    @property
    def _running(self) -> Channel:
        if self._channel is None:
            raise EngineDownError("the engine is not running; try again soon")
        return self._channel

    async def _started(self) -> Channel:
        """Start a process, and return the channel to it when it is ready."""
        ours, theirs = socket.socketpair()
        own = _environment(self._setup)
        how = {"pass_fds": [theirs.fileno()], "env": own, "stdin": asyncio.subprocess.DEVNULL}
        command = [sys.executable, "-P", "-m", "mt_infer.backends.worker", str(theirs.fileno())]
        try:  # what it prints is no result of ours; a signal to our group is not for it
            self._process = await asyncio.create_subprocess_exec(
                *command, stdout=sys.__stderr__, start_new_session=True, **how
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            writer.write(pack({"setup": self._setup}))
            found = await next_message(reader)
        except BaseException:
            writer.close()
            raise
        if found is None or "failed" in found:
            writer.close()
            await self._end()
            ended = "the engine's process has ended; its log says why"
            raise EngineStartError(found["failed"] if found else ended)
        self._take_facts(found["facts"])
        self._take_texts(found)
        self._is_asleep = False
        self._channel = Channel(reader, writer, self._take_facts, self._max_stream_bytes)
        return self._channel

    async def _watch(self, channel: Channel) -> None:
        """Serve the channel; when it ends, start another process."""
        wait = _FIRST_WAIT_S
        while True:
            begun = time.monotonic()
            await channel.serve(_SILENT_S)
            await self._end()
            wait = _FIRST_WAIT_S if time.monotonic() - begun > 2 * _LONGEST_WAIT_S else wait
            while not channel.is_open:
                _log.error("the engine has ended, and is started again", extra={"wait_s": wait})
                await asyncio.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT_S)
                try:
                    channel = await self._started()
                except (EngineStartError, EngineDownError, OSError, ValueError) as error:
                    _log.error("the engine does not start", extra={"error": str(error)})
            _log.info("the engine is ready again", extra={"pid": self.pid})

    async def _end(self) -> None:
        """Wait for the process, whose socket is closed; kill it if it doesn't end."""
        if self._process is None:
            return
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._process = None

    def _take_facts(self, facts: Facts) -> None:
        self._facts = facts

    def _take_texts(self, message: dict[str, Any]) -> None:
        self._folder = Path(message["folder"])
        if message["tokenizer"] is not None and self._tokenizer is None:
            path, eod = message["tokenizer"]
            self._tokenizer = load_tokenizer(Path(path), eod=eod)


def _environment(setup: Setup) -> dict[str, str]:
    """Return the environment of an engine's process, without the key of clients."""
    own = _MEMORY | {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    if setup.nproc == 1:
        return own
    own.setdefault("OMP_NUM_THREADS", str((os.cpu_count() or 1) // setup.nproc or 1))
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:  # the ranks would listen for each other on every interface
        own.setdefault("GLOO_SOCKET_IFNAME", loopback)
    end = (setup.device + 1) * setup.nproc
    named = own.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(end)))).split(",")
    if setup.device:  # the GPUs behind those of the groups before
        own["CUDA_VISIBLE_DEVICES"] = ",".join(named[end - setup.nproc : end])
    return own
