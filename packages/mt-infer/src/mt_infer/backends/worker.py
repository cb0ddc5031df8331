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

from mt_infer.backends.local import LocalEngine
from mt_infer.backends.wire import (
    asked_of,
    delta_message,
    error_message,
    facts_message,
    next_message,
    packed,
)
from mt_infer.engine.engine import Engine
from mt_infer.errors import explain
from mt_infer.loading import Run
from mt_infer.logs import log_to
from mt_infer.threads import use_threads

_POLL_S = 1.0
_CALLS = ("embed", "stats", "load_step", "sleep", "wake", "load_adapter", "remove_adapter")
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
            message, raw = found
            number, name = message.pop("id"), message.pop("do")
            if name == "cancel":
                if number in self._tasks:
                    self._tasks[number].cancel()
                continue
            work = self._work(number, name, message, raw)
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

    def _work(
        self, number: int, name: str, message: dict[str, Any], raw: bytes
    ) -> Coroutine[Any, Any, Any]:
        """Return the work of a request."""
        if name == "stream":
            return self._stream(number, message, raw)
        if name == "hand_over":
            return self._engine.hand_over(asked_of(message, raw))
        if name == "take_over":
            return self._engine.take_over(raw)
        return self._call(number, name, message)

    async def _done(self, number: int, work: Coroutine[Any, Any, Any]) -> None:
        """Send what a request's work returns or raises."""
        try:
            found = await work
            raw = found if isinstance(found, bytes) else b""
            self._send(number, raw, done=None if raw else found)
        except Exception as error:  # noqa: BLE001 - the server raises it
            self._send(number, error=error_message(error))
            if not self._engine.is_alive:
                _log.critical("the engine failed", exc_info=error)
                os._exit(1)
        finally:
            del self._tasks[number]

    async def _stream(self, number: int, message: dict[str, Any], raw: bytes) -> None:
        async with aclosing(self._engine.stream(asked_of(message, raw))) as deltas:
            async for delta in deltas:
                self._say_facts()
                self._send(number, delta=delta_message(delta))
                await self._writer.drain()

    async def _call(self, number: int, name: str, message: dict[str, Any]) -> Any:
        if name not in _CALLS:
            raise ValueError(f"the engine has no call {name!r}")
        try:
            return await getattr(self._engine, name)(**message)
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
            self._writer.write(packed({"facts": facts_message(self._engine.facts)}))

    def _send(self, number: int, raw: bytes = b"", **message: Any) -> None:
        self._writer.write(packed({"id": number, **message}, raw))


def loaded(setup: dict[str, Any]) -> LocalEngine:
    """Load the engine of a setup.

    Args:
        setup: The fields of `Setup`.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(setup["device"] % torch.cuda.device_count())
    how = {name: setup[name] for name in ("step", "dtype", "adapters")}
    engine = Engine.from_folder(setup["folder"], **how, **setup["options"])
    use_threads(engine.model)
    return LocalEngine(engine, name=setup["name"])


def _ready(engine: LocalEngine) -> dict[str, Any]:
    """Return the first message: the facts, and where the tokenizer and the chat template are."""
    run, tokenizer = engine.engine.run, engine.tokenizer
    assert run is not None, "it was made from a folder"  # noqa: S101
    source = run.source
    path = RunFolder(run.folder).tokenizer if isinstance(source, Path) else source.tokenizer
    named = None if tokenizer is None else [str(path), tokenizer.eod_token]
    return {"facts": facts_message(engine.facts), "tokenizer": named, "folder": str(engine.folder)}


async def _main(descriptor: int) -> int:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    found = await next_message(reader)
    if found is None:
        return 0
    setup, _ = found
    loading = asyncio.create_task(asyncio.to_thread(loaded, setup))
    try:
        engine = await loading
    except Exception as error:
        explained = explain(error)
        writer.write(packed({"failed": str(error) if explained is None else explained[1]}))
        await writer.drain()
        if explained is None:
            raise
        return explained[0]
    writer.write(packed(_ready(engine)))
    worker = Worker(engine, reader, writer)
    if setup["follow"] and engine.engine.run is not None:
        following = asyncio.create_task(worker.follow(engine.engine.run))
        following.add_done_callback(lambda _: os._exit(1))
    await worker.serve()
    os._exit(0)  # nobody waits for a pass that still runs


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[1]), False)  # noqa: FBT003
    log_to(sys.stderr)
    sys.exit(asyncio.run(_main(int(sys.argv[1]))))
