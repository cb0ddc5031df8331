"""The engine's process: `python -m mt_infer.backends.worker FD`, with a socket to the server."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch
from mt_ckpt import RunFolder, latest_checkpoint
from mt_files import UserError

from mt_infer.backends.backend import Job, Setup
from mt_infer.backends.local import LocalEngine
from mt_infer.backends.wire import error_message, next_message
from mt_infer.engine.engine import Engine
from mt_infer.errors import explain
from mt_infer.loading import Run
from mt_infer.logs import log_to
from mt_infer.message import pack
from mt_infer.threads import use_threads

_POLL_S = 1.0
_CALLS = frozenset(
    {
        "embed",
        "hand_over",
        "take_over",
        "stats",
        "load_step",
        "sleep",
        "wake",
        "load_adapter",
        "remove_adapter",
    }
)
_log = logging.getLogger("mt_infer.server")


class Worker:
    """Serves the messages of one server.

    Args:
        engine: The engine.
        reader: Messages of the server.
        writer: Messages to it.
    """

    def __init__(
        self, engine: LocalEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._engine, self._reader, self._writer = engine, reader, writer
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._said = engine.engine.identity, engine.engine.adapters

    async def serve(self) -> None:
        """Serve messages until the server closes the socket."""
        while (found := await next_message(self._reader)) is not None:
            number, name, arguments = found["id"], found["do"], found["arguments"]
            if name == "cancel":
                if number in self._tasks:
                    self._tasks[number].cancel()
                continue
            is_stream = name == "stream"
            work = self._stream(number, **arguments) if is_stream else self._call(name, arguments)
            self._tasks[number] = asyncio.create_task(self._done(number, work))

    async def follow(self, run: Run) -> None:
        """Load each newer step of a run soon after it is committed."""
        folder, name = RunFolder(run.folder).checkpoints, Path(str(run.source)).name
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                newest = await asyncio.to_thread(latest_checkpoint, folder)
                if newest is None or newest.name == name:
                    continue
                name = newest.name
                await self._engine.load_step()
                self._say_facts()
                _log.info("loaded", extra={"step": self._engine.engine.step})
            except (OSError, UserError, ValueError) as error:  # it may have been removed meanwhile
                _log.warning("a step was not loaded", extra={"error": str(error)})
                self._end_if_asleep()

    async def _done(self, number: int, work: Coroutine[Any, Any, Any]) -> None:
        """Send what a request's work returns or raises."""
        try:
            self._send(id=number, done=await work)
        except Exception as error:  # noqa: BLE001 - the server raises it
            self._send(id=number, error=error_message(error))
            if not self._engine.is_alive:
                _log.critical("the engine failed", exc_info=error)
                os._exit(1)
        finally:
            del self._tasks[number]

    async def _stream(self, number: int, job: Job) -> None:
        async with aclosing(self._engine.stream(job)) as deltas:
            async for delta in deltas:
                self._say_facts()
                self._send(id=number, delta=delta)
                await self._writer.drain()

    async def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        if name not in _CALLS:
            raise ValueError(f"the engine has no call {name!r}")
        try:
            return await getattr(self._engine, name)(**arguments)
        finally:
            if name == "load_step":
                self._end_if_asleep()
            self._say_facts()

    def _end_if_asleep(self) -> None:
        """End the process if half-read weights let the engine sleep; the next one reads all."""
        if self._engine.has_lost_weights:
            _log.critical("the weights are of two steps")
            os._exit(1)

    def _say_facts(self) -> None:
        """Tell the server of another step or adapter, before an answer has it."""
        changing = self._engine.engine.identity, self._engine.engine.adapters
        if changing != self._said:
            self._said = changing
            self._send(facts=self._engine.facts)

    def _send(self, **message: Any) -> None:
        self._writer.write(pack(message))


def loaded(setup: Setup) -> LocalEngine:
    """Load the engine of a setup."""
    if torch.cuda.is_available():
        torch.cuda.set_device(setup.device % torch.cuda.device_count())
    how = {"step": setup.step, "dtype": setup.dtype, "adapters": setup.adapters}
    engine = Engine.from_folder(setup.folder, **how, **setup.options)
    use_threads(engine.model)
    return LocalEngine(engine, name=setup.name)


def _ready(engine: LocalEngine) -> dict[str, Any]:
    """Return the first message: the facts, and where the tokenizer and the chat template are."""
    run, tokenizer = engine.engine.run, engine.tokenizer
    assert run is not None, "it was made from a folder"  # noqa: S101
    source = run.source
    path = RunFolder(run.folder).tokenizer if isinstance(source, Path) else source.tokenizer
    named = None if tokenizer is None else [str(path), tokenizer.eod_token]
    return {"facts": engine.facts, "tokenizer": named, "folder": str(engine.folder)}


async def _main(descriptor: int) -> int:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    found = await next_message(reader)
    if found is None:
        return 0
    setup: Setup = found["setup"]
    loading = asyncio.create_task(asyncio.to_thread(loaded, setup))
    try:
        engine = await loading
    except Exception as error:
        explained = explain(error)
        writer.write(pack({"failed": str(error) if explained is None else explained[1]}))
        await writer.drain()
        if explained is None:
            raise
        return explained[0]
    writer.write(pack(_ready(engine)))
    worker = Worker(engine, reader, writer)
    if setup.follow and engine.engine.run is not None:
        following = asyncio.create_task(worker.follow(engine.engine.run))
        following.add_done_callback(lambda _: os._exit(1))
    await worker.serve()
    os._exit(0)  # nobody waits for a pass that still runs


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[1]), False)  # noqa: FBT003
    log_to(sys.stderr)
    sys.exit(asyncio.run(_main(int(sys.argv[1]))))
