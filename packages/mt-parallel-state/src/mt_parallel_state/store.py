"""The store in which ranks meet: hosting it on loopback, finding it, and waiting for all ranks."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from mt_files import UserError
from torch.distributed import TCPStore

from mt_parallel_state.environment import DistributedEnv

_LOG = logging.getLogger("mt_parallel_state")
_LOOPBACK = ("127.0.0.1", "localhost")
_BACKLOG = 2048
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.25
_SILENT_SECONDS, _REPEAT_SECONDS = 10.0, 60.0
_MOST_NAMED = 16
_PROBE_SECONDS = 5.0


class JoinError(UserError, dist.DistError):
    """This process can't meet the other ranks; the message says why."""


def host_on_loopback(port: int = 0) -> TCPStore:
    """Host a store that listens on 127.0.0.1 alone; port 0 lets the system choose.

    Left to itself a TCPStore listens on every interface, and whoever reaches it may write into it.

    Raises:
        JoinError: The port is taken, or this machine's loopback interface does not work.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((_LOOPBACK[0], port))
            listener.listen(_BACKLOG)
            chosen = listener.getsockname()[1]
            _probe(_LOOPBACK[0], chosen)
        except OSError as error:
            where = f"{_LOOPBACK[0]}:{port}" if port else _LOOPBACK[0]
            raise JoinError(
                f"ranks of one machine meet at {where}, which does not work here: {error}"
            ) from error
        return TCPStore(
            _LOOPBACK[0],
            chosen,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store closes it
        )


def meet(env: DistributedEnv, timeout: timedelta) -> dist.Store:
    """Connect to the store of `env`, wait until every rank has, and return it for this attempt.

    A launcher that starts all ranks again after a failure keeps its store, with the keys of the
    former ranks. So keys belong to an attempt, which rank 0 opens, and completes once all ranks are
    in it; a rank that finds its own predecessor's keys waits for the next attempt. (torchrun's own
    count of restarts differs between nodes: only the node of the failure counts.)

    After a while the first rank to arrive logs (`mt_parallel_state`) the missing ranks; every rank
    logs while there is no store, or no rank 0. All waiting is done in Python, so that signal
    handlers run.

    Raises:
        JoinError: There is no store or a rank is missing when the time is up.
    """
    started = time.monotonic()
    attempt = _Attempt(_connect(env, started, timeout.total_seconds()), env)
    total = f"of {env.world_size}"
    _wait(attempt.is_complete, attempt.missing, total, started, timeout.total_seconds())
    return attempt.store


class _Attempt:
    """The newest attempt of all ranks to meet, as one rank sees it."""

    def __init__(self, store: dist.Store, env: DistributedEnv) -> None:
        self._root = dist.PrefixStore("mt_parallel_state", store)
        self._rank, self._world = env.rank, env.world_size
        self._number, self._is_in = 0, False
        if self._rank == 0:
            self._enter(self._root.add("attempts", 1))

    def _enter(self, number: int) -> None:
        """Enter an attempt, unless an earlier process of this rank is in it."""
        self._number = number
        self.store = dist.PrefixStore(f"attempt-{number}", self._root)
        self._arrived = dist.PrefixStore("arrived", self.store)
        self._is_in = self._arrived.add(str(self._rank), 1) == 1
        if self._is_in:
            self._arrived.add("count", 1)

    def is_complete(self) -> bool:
        """Return whether all ranks are in the attempt, which rank 0 tells the others."""
        if self._rank == 0:
            if self._arrived.add("count", 0) < self._world:
                return False
            self.store.set("complete", "")
            return True
        newest = self._root.add("attempts", 0)
        if newest > self._number:
            self._enter(newest)
        return self._is_in and self.store.check(["complete"])

    def missing(self) -> str | None:
        """Return the missing ranks on the first present rank, and None on the others."""
        if not self._is_in:
            return _ranks([0])
        absent = [rank for rank in range(self._world) if not self._arrived.check([str(rank)])]
        speaks = next((rank for rank in range(self._world) if rank not in set(absent)), 0)
        return _ranks(absent) if absent and speaks == self._rank else None


def _connect(env: DistributedEnv, started: float, timeout: float) -> dist.Store:
    host, port = env.master_addr.strip("[]"), env.master_port
    hosts = env.rank == 0 and not env.store_is_served
    if hosts and host in _LOOPBACK:
        return host_on_loopback(port)
    if not hosts:
        problem: list[OSError] = []

        def reachable() -> bool:
            problem.clear()
            try:
                _probe(host, port)
            except OSError as error:
                problem.append(error)
            return not problem

        _wait(
            reachable,
            lambda: f"the store of rank 0 at {host}:{port} ({problem[0] if problem else 'late'})",
            "",
            started,
            timeout,
        )
    try:
        return TCPStore(
            host, port, is_master=hosts, wait_for_workers=False, timeout=timedelta(seconds=timeout)
        )
    except dist.DistError as error:
        raise JoinError(f"no store at {host}:{port}: {first_line(error)}") from error


def _probe(host: str, port: int) -> None:
    """Raise OSError where nothing listens. TCPStore would print pages before it did."""
    socket.create_connection((host, port), timeout=_PROBE_SECONDS).close()


def _wait(
    ready: Callable[[], bool],
    missing: Callable[[], str | None],
    total: str,
    started: float,
    timeout: float,
) -> None:
    pause, speak_at = _FIRST_PAUSE, started + _SILENT_SECONDS
    while not ready():
        now = time.monotonic()
        if now - started > timeout:
            raise JoinError(
                f"waited {timeout:g} s for {missing() or 'other ranks'}; start all ranks, or look "
                "why those did not come"
            )
        if now > speak_at:
            speak_at = now + _REPEAT_SECONDS
            if (text := missing()) is not None:
                _LOG.warning("waiting for %s", f"{text} {total}".rstrip())
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def first_line(error: BaseException) -> str:
    """Return the first line of an error of torch, without the stack of its C++ code."""
    return str(error).strip().partition("\n")[0]


def _ranks(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {named}{more}"
