"""Starts the ranks of one node as plain processes, and sees them to their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from torch.distributed import TCPStore

__all__ = ["launch"]

_POLL_SECONDS = 0.02
_FAILURE_GRACE_SECONDS = 3.0
_STOP_GRACE_SECONDS = 120.0
_RANK_PROCESS = str(Path(__file__).with_name("rank_process.py"))
_FORWARDED = (signal.SIGTERM, signal.SIGINT)


def launch(module: str, args: Sequence[str], nproc: int) -> int:
    """Runs ``python -m module args`` as ``nproc`` ranks on this machine and waits for them.

    Every rank gets torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT), so :func:`detect_env` works in it. The rendezvous store is hosted
    here, on a port the system picked, so no port can be taken by somebody else in between.
    OMP_NUM_THREADS is the number of cores divided by ``nproc`` unless it is set.

    SIGTERM and SIGINT are passed on to the ranks, which then have two minutes to save and leave.
    When a rank dies, the others are ended: SIGTERM at once, SIGKILL three seconds later, since a
    rank inside a collective cannot react to the former. On Linux the ranks also end when this
    process is killed.

    Args:
        module: What ``python -m`` takes.
        args: Its arguments.
        nproc: Number of ranks, at least 1.

    Returns:
        0 if every rank exited with 0, else the exit code of the first rank that did not (128 + the
        signal number if a signal killed it). That rank is named on stderr.
    """
    if nproc < 1:
        raise ValueError(f"nproc must be at least 1, got {nproc}")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[subprocess.Popen[bytes]] = []
    with _signals_noted() as noted:
        try:
            for rank in range(nproc):
                ranks.append(_start(module, args, rank, nproc, store.port))
            return _supervise(ranks, noted)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
            for process in ranks:
                process.wait()


def _start(
    module: str, args: Sequence[str], rank: int, nproc: int, port: int
) -> subprocess.Popen[bytes]:
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # Makes rank 0 a client of our store too, instead of a second server on the same port.
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(_cores() // nproc or 1),
    }
    return subprocess.Popen(  # noqa: S603 - the command is the caller's own module
        [sys.executable, _RANK_PROCESS, str(os.getpid()), module, *args],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        # In a session of its own a rank gets Ctrl-C once, from us, and not also from the terminal.
        start_new_session=True,
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT in the list it yields (only the main thread can)."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)

    previous = {number: signal.signal(number, note) for number in _FORWARDED}
    try:
        yield noted
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _supervise(ranks: list[subprocess.Popen[bytes]], noted: list[int]) -> int:
    failed: int | None = None
    deadline = float("inf")
    forwarded = 0
    while any(process.poll() is None for process in ranks):
        if failed is None and (failed := _first_failure(ranks)) is not None:
            alive = [process for process in ranks if process.poll() is None]
            _report(failed, ranks[failed].returncode, len(alive))
            _signal_all(alive, signal.SIGTERM)
            deadline = min(deadline, time.monotonic() + _FAILURE_GRACE_SECONDS)
        while forwarded < len(noted):
            _signal_all(ranks, noted[forwarded])
            forwarded += 1
            deadline = min(deadline, time.monotonic() + _STOP_GRACE_SECONDS)
        if time.monotonic() > deadline:
            _signal_all(ranks, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(_POLL_SECONDS)
    if failed is None and (failed := _first_failure(ranks)) is not None:
        _report(failed, ranks[failed].returncode, 0)
    return 0 if failed is None else _exit_code(ranks[failed].returncode)


def _first_failure(ranks: list[subprocess.Popen[bytes]]) -> int | None:
    """The rank that failed; a signal goes first, being the cause of its neighbours' errors."""
    codes = [(process.poll() or 0, rank) for rank, process in enumerate(ranks)]
    return next((rank for code, rank in sorted(codes) if code), None)


def _signal_all(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in ranks:
        if process.poll() is None:
            process.send_signal(number)


def _report(rank: int, code: int, others: int) -> None:
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
    rest = f"; ending the other {others}" if others else ""
    sys.stderr.write(f"rank {rank} {how}{rest}\n")
    sys.stderr.flush()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code
