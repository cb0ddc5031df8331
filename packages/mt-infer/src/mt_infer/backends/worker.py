"""The engine's process: `python -m mt_infer.backends.worker FD`, with a socket to the server.

If several ranks share the model, this process is the first, and starts the others with a JSON text
of the setup in place of FD.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import torch
from mt_ckpt import RunFolder, latest_checkpoint
from mt_files import UserError
from mt_parallel_state import (
    DistributedEnv,
    ParallelLayout,
    ParallelState,
    detect_env,
    init_process_group,
    leading,
)

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
_RANK_POLL_S, _RANK_GRACE_S = 0.05, 0.2
_log = logging.getLogger("mt_infer.server")


class Worker:
    """A worker that serves the messages of one server.

    Args:
        engine: The engine.
        reader: Messages from the server.
        writer: Messages to the server.
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
        """Send the result or the error of a request's work."""
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
        """End the process if the engine sleeps after a partial read; the next process reads all."""
        if self._engine.has_lost_weights:
            _log.critical("the weights are of two steps")
            os._exit(1)

    def _say_facts(self) -> None:
        """Tell the server about a new step or adapter before an answer uses it."""
        changing = self._engine.engine.identity, self._engine.engine.adapters
        if changing != self._said:
            self._said = changing
            self._send(facts=self._engine.facts)

    def _send(self, **message: Any) -> None:
        self._writer.write(pack(message))


def loaded(setup: Setup, env: DistributedEnv) -> Engine:
    """Load a rank's engine of a setup; all ranks call it.

    Args:
        setup: What to load.
        env: Rank of this process.
    """
    state = None
    if env.world_size > 1:
        layout = ParallelLayout(tp=env.world_size // setup.pp, pp=setup.pp)
        state = ParallelState(layout, rank=env.rank, device=init_process_group(env))
    elif torch.cuda.is_available():
        torch.cuda.set_device(setup.device % torch.cuda.device_count())
    how = {"step": setup.step, "dtype": setup.dtype, "adapters": setup.adapters}
    engine = Engine.from_folder(setup.folder, state=state, **how, **setup.options)
    use_threads(engine.model)
    return engine


def _end_with(others: Sequence[subprocess.Popen[bytes]]) -> None:
    """End this process if another one ends, since a pass would wait for it."""
    while (ended := next((each for each in others if each.poll() is not None), None)) is None:
        time.sleep(_RANK_POLL_S)
    time.sleep(_RANK_GRACE_S)  # this rank reports an error that all ranks have
    _log.critical("a rank of the engine has ended", extra={"code": ended.returncode})
    os._exit(1)


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
    with ExitStack() as stack:
        env = DistributedEnv()
        if setup.nproc > 1:
            given = "mt_infer.backends.worker", [json.dumps(vars(setup))], setup.nproc
            env, others = stack.enter_context(leading(*given))
            threading.Thread(target=_end_with, args=(others,), daemon=True).start()
        return await _serve(setup, env, reader, writer)


async def _serve(
    setup: Setup,
    env: DistributedEnv,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> int:
    """Load the engine, serve the server's messages, and return the exit status of a failure."""
    try:
        engine = LocalEngine(await asyncio.to_thread(loaded, setup, env), name=setup.name)
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
    log_to(sys.stderr)
    if sys.argv[1].startswith("{"):
        loaded(Setup(**json.loads(sys.argv[1])), detect_env()).serve()
        os._exit(0)
    os.set_inheritable(int(sys.argv[1]), False)  # noqa: FBT003
    sys.exit(asyncio.run(_main(int(sys.argv[1]))))
