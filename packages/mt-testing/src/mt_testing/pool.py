"""A pool of rank processes that lives as long as the test session."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import signal
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import IO, Any, Literal, TypeVar

from mt_testing.errors import PoolError, RankFailure
from mt_testing.forkserver import ForkServer
from mt_testing.programs import Programs
from mt_testing.protocol import FINISH, Call
from mt_testing.report import Outcome, trim_stack
from mt_testing.shipping import dump_call

T = TypeVar("T")
MAX_WORLD_SIZE = 32
GRACE = 1.0  # seconds in which the peers of a failed rank may end or fail by themselves
CLEANING = 10.0  # seconds in which a rank has to clean up after a call
STACK_WAIT = 1.0  # seconds in which a hanging rank has to write its stacks
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Worker:
    rank: int
    pid: int
    connection: Connection
    notes: IO[bytes]

    def read_notes(self) -> str:
        size = os.fstat(self.notes.fileno()).st_size
        return os.pread(self.notes.fileno(), size, 0).decode(errors="replace")


@dataclass(kw_only=True)
class _Processes:
    """The processes of a pool: the server and the workers that it forked."""

    server: ForkServer
    workers: list[_Worker] = field(default_factory=list)

    def forget_workers(self) -> None:
        for worker in self.workers:
            worker.connection.close()
            worker.notes.close()
        self.workers.clear()

    def close(self) -> None:
        self.forget_workers()
        self.server.close()


class RankPool:
    """Run functions on N ranks, each of them a process in a process group.

    The first call starts a fork server, which imports torch once (the only slow step). Processes
    are forked when a call needs them, and kept for the next call. Use it as a context manager, or
    call `close`; in any case, the processes end with the interpreter.

    Args:
        preload: Modules to import once in the fork server, besides torch and every installed
            `mt_*` package.
        start_timeout: Time limit of the imports in seconds.

    Example:
        >>> with RankPool() as ranks:
        ...     ranks(2, lambda: torch.distributed.get_rank())
        [0, 1]
    """

    def __init__(self, *, preload: Sequence[str] = (), start_timeout: float = 300.0) -> None:
        self._preload = tuple(preload)
        self._start_timeout = start_timeout
        self._processes: _Processes | None = None
        self._finalizer: weakref.finalize | None = None
        self._calls = itertools.count()
        self._cleaning: list[_Worker] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def preload_errors(self) -> dict[str, str]:
        """Traceback of each module that could not be preloaded; empty before the first call."""
        return {} if self._processes is None else dict(self._processes.server.preload_errors)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the living ranks, by rank."""
        return () if self._processes is None else tuple(w.pid for w in self._processes.workers)

    def __call__(
        self,
        world_size: int,
        fn: Callable[..., T],
        *args: Any,
        timeout: float = 60.0,
        backend: Literal["gloo", "nccl"] = "gloo",
    ) -> list[T]:
        """Run `fn(*args)` on every rank of a new world, and return the results by rank.

        Args:
            world_size: Number of ranks, 1 to 32.
            fn: Any function, even a closure or a lambda; it is sent by value.
            *args: Arguments, sent to every rank.
            timeout: Time limit in seconds, after which running ranks are reported and ended.
            backend: "gloo", or "nccl" for "cpu:gloo,cuda:nccl" with one GPU per rank.

        Raises:
            RankFailure: A rank raised.
            RankDied: A rank's process ended.
            RankTimeout: Ranks were still running after `timeout` seconds.
            PoolError: No processes could be started.
        """
        __tracebackhide__ = True
        _validate(world_size, timeout, backend)
        payload = dump_call(fn, args)
        self._await_cleaning()
        workers = self._workers(world_size)
        message = pickle.dumps(self._call(payload, world_size, timeout, backend))
        outcome = Outcome(world_size=world_size)
        try:
            _send(workers, message)
            self._collect(workers, outcome, time.monotonic() + timeout)
            failure = self._failure(workers, outcome, timeout)
        except BaseException:
            self.kill()
            raise
        if failure is None or outcome.is_settled:
            _send(workers, FINISH)
            self._cleaning = list(workers)
        else:
            self.kill()
        if failure is not None:
            raise failure
        return [pickle.loads(outcome.results[rank]) for rank in range(world_size)]  # noqa: S301

    def programs(self, *preload: str) -> Programs:
        """Return stand-ins for the interpreter and the `mt-*` programs, whose processes are forks.

        Args:
            *preload: Modules to import once for all programs, besides those of the fork server.

        Raises:
            PoolError: No processes could be started.
        """
        processes = self._processes or self._start()
        return Programs(processes.server, preload, self._start_timeout)

    def close(self) -> None:
        """End all processes; a later call starts new ones."""
        if self._finalizer is not None:
            self._finalizer()
        self._processes = self._finalizer = None
        self._cleaning = []

    def kill(self) -> None:
        """End the ranks, even hanging ones, and keep the fork server for the next call."""
        processes = self._processes
        self._cleaning = []
        if processes is None:
            return
        server = processes.server
        alive = {worker.pid for worker in processes.workers}
        try:
            for pid in alive:
                server.signal(pid, signal.SIGKILL, whole_group=True)
            processes.forget_workers()
            deadline = time.monotonic() + 10
            while not alive <= server.ended.keys() and time.monotonic() < deadline:
                server.pump(deadline - time.monotonic())
        except PoolError:
            self.close()
        else:
            if not alive <= server.ended.keys():
                self.close()
            server.ended.clear()

    def _start(self) -> _Processes:
        server = ForkServer(self._preload)
        processes = _Processes(server=server)
        self._finalizer = weakref.finalize(self, processes.close)
        try:
            server.wait_ready(self._start_timeout)
        except BaseException:
            self.close()
            raise
        for name, text in server.preload_errors.items():
            _LOG.warning("could not preload %s into the rank pool:\n%s", name, text)
        self._processes = processes
        return processes

    def _await_cleaning(self) -> None:
        """Start new ranks if one does not return from cleaning up after the last call.

        So a call only sends to ranks that listen, and is not blamed for the previous call.
        """
        cleaning = {worker.connection: worker.rank for worker in self._cleaning}
        deadline = time.monotonic() + CLEANING
        while cleaning:
            ready = wait(list(cleaning), max(0.0, deadline - time.monotonic()))
            try:
                for connection in [each for each in cleaning if each in ready]:
                    connection.recv_bytes()
                    del cleaning[connection]
            except (EOFError, ConnectionResetError):
                ready = []
            if not ready:
                _LOG.warning(
                    "ranks %s ended or hung while they cleaned up after the last call (objects of "
                    "the test that are finalized late, or its threads); starting new ones",
                    sorted(cleaning.values()),
                )
                self.kill()
                return

    def _workers(self, count: int) -> list[_Worker]:
        if self._processes is not None:
            self._discard_ended(self._processes)
        processes = self._processes or self._start()
        while len(processes.workers) < count:
            processes.workers.append(_fork(processes.server, len(processes.workers)))
        return processes.workers[:count]

    def _discard_ended(self, processes: _Processes) -> None:
        """Start new processes if the server or an idle rank has ended since the last call."""
        try:
            processes.server.pump()
        except PoolError:
            self.close()
            return
        if any(worker.pid in processes.server.ended for worker in processes.workers):
            self.kill()

    def _call(self, payload: bytes, world_size: int, timeout: float, backend: str) -> object:
        environ = dict(os.environ)
        environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        if sys.platform in _LOOPBACK:  # no look-up of the host's name, no firewall
            environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK[sys.platform])
        return Call(
            payload=payload,
            world_size=world_size,
            backend=backend,
            store=os.path.join(self._server.directory, f"call{next(self._calls)}"),
            # Longer than the call's own limit, so that a hang is reported with stacks and not as a
            # time-out of gloo or of the store on some peer.
            timeout=timeout + 30.0,
            environ=environ,
            directory=os.getcwd(),
            sys_path=list(sys.path),
        )

    def _collect(self, workers: list[_Worker], outcome: Outcome, deadline: float) -> None:
        """Collect answers until all are there, or the time or a failed call's grace is over."""
        server = self._server
        waiting = {worker.connection: worker for worker in workers}
        while outcome.running:
            sources = [server.control, *waiting]
            ready = wait(sources, max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for connection, worker in list(waiting.items()):
                if connection not in ready:
                    continue
                del waiting[connection]
                # No answer means that the process ended; the server reports how.
                with contextlib.suppress(EOFError, ConnectionResetError):
                    outcome.answered(worker.rank, pickle.loads(connection.recv_bytes()))  # noqa: S301
            server.pump()
            for worker in workers:
                if worker.pid in server.ended:
                    outcome.died(worker.rank, server.ended[worker.pid])
            if outcome.has_failed:
                deadline = min(deadline, time.monotonic() + GRACE)

    def _failure(
        self, workers: list[_Worker], outcome: Outcome, timeout: float
    ) -> RankFailure | None:
        if outcome.has_failed:
            return outcome.failure({worker.rank: worker.read_notes() for worker in workers})
        if outcome.running:
            return outcome.timed_out(timeout, self._stacks(workers, outcome.running))
        return None

    def _stacks(self, workers: list[_Worker], running: set[int]) -> dict[int, str]:
        """Let the running ranks write their stacks, and return them."""
        hanging = [worker for worker in workers if worker.rank in running]
        for worker in hanging:
            self._server.signal(worker.pid, signal.SIGUSR2)
        deadline = time.monotonic() + STACK_WAIT
        before: dict[int, str] = {}
        while True:
            time.sleep(0.05)
            stacks = {worker.rank: worker.read_notes() for worker in hanging}
            if time.monotonic() > deadline or (all(stacks.values()) and stacks == before):
                return {rank: trim_stack(text) for rank, text in stacks.items()}
            before = stacks

    @property
    def _server(self) -> ForkServer:
        if self._processes is None:
            raise PoolError("the rank pool was closed during a call")
        return self._processes.server


def _fork(server: ForkServer, rank: int) -> _Worker:
    ours, theirs = Pipe()
    notes = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the rank
    try:
        with theirs:
            pid = server.fork([theirs.fileno(), notes.fileno()])
    except BaseException:
        ours.close()
        notes.close()
        raise
    ours.send_bytes(pickle.dumps(rank))
    return _Worker(rank=rank, pid=pid, connection=ours, notes=notes)


def _send(workers: list[_Worker], message: bytes) -> None:
    for worker in workers:
        with contextlib.suppress(ConnectionError):  # it ended; the server reports how
            worker.connection.send_bytes(message)


def _validate(world_size: int, timeout: float, backend: str) -> None:
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(
            f"world_size must be an int, not {type(world_size).__name__}; "
            "call ranks(world_size, fn, *args)"
        )
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ValueError(
            f"world_size is {world_size}; a pool runs 1 to {MAX_WORLD_SIZE} ranks. "
            "For rank arithmetic at larger worlds use fake_world(size)"
        )
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be a number of seconds, got {timeout!r}")
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout} s; it must be positive")
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend is {backend!r}; use 'gloo' or 'nccl'")
