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
    """Connect to the store of `env` and wait until every rank has.

    After a while the first rank to arrive logs (`mt_parallel_state`) which ranks are missing; every
    rank logs while there is no store. All waiting is done in Python, so that signal handlers run.

    Raises:
        JoinError: There is no store or a rank is missing when the time is up.
    """
    started = time.monotonic()
    store = _connect(env, started, timeout.total_seconds())
    arrived = dist.PrefixStore("mt_parallel_state/arrived", store)
    arrived.set(str(env.rank), "")
    count = arrived.add("count", 1)

    def all_here() -> bool:
        nonlocal count
        count = arrived.add("count", 0)
        return count >= env.world_size

    def missing() -> str | None:
        absent = [r for r in range(env.world_size) if not arrived.check([str(r)])]
        speaks = next((r for r in range(env.world_size) if r not in set(absent)), 0)
        return _ranks(absent) if absent and speaks == env.rank else None

    _wait(all_here, missing, f"of {env.world_size}", started, timeout.total_seconds())
    return store


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
