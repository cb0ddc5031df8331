"""Starts the ranks of one node as plain processes, and sees them to their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mt_files import check_type

from mt_parallel_state.environment import DistributedEnv
from mt_parallel_state.signals import signal_name, signals_to
from mt_parallel_state.store import host_on_loopback

MOST_LOCAL_RANKS = 1024
STOPPED = 75
_POLL_SECONDS = 0.02
_FAILURE_GRACE_SECONDS = 3.0
_STOP_GRACE_SECONDS = 120.0
_SECOND_SIGNAL_GRACE_SECONDS = 1.0
_RANK_PROCESS = str(Path(__file__).with_name("rank_process.py"))


def launch(module: str, args: Sequence[str], nproc: int) -> int:
    """Run `python -P -m module args` as `nproc` ranks on this machine and wait for them.

    Every rank gets torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT), so `detect_env` works in it. The rendezvous store is hosted here, on
    a loopback port that the system picked: no other machine reaches it, and nobody can take the
    port in between. OMP_NUM_THREADS is the number of cores divided by `nproc` unless it is set.

    SIGTERM, SIGINT and SIGHUP are passed on to the ranks, which then have two minutes to save and
    leave; a second signal is passed on too, and what still runs a second later is killed, which
    counts as an end by that signal. When a rank fails, the others are ended: SIGTERM at once,
    SIGKILL three seconds later, since a rank inside a collective may not react to the former. A
    rank that exits with 75 was stopped and can be resumed, which is no failure. On Linux the ranks
    also end when this process is killed.

    Args:
        module: An installed module, or one on PYTHONPATH; the working directory is not searched.
        args: Its arguments.
        nproc: Number of ranks, 1 to 1024.

    Returns:
        0 if every rank exited with 0; 75 if the others exited with 75; else the exit code of the
        first rank that failed (128 + the signal number if a signal killed it), which is named on
        stderr unless the forwarded signal ended it.
    """
    check_type("module", module, str)
    check_type("nproc", nproc, int)
    if not 1 <= nproc <= MOST_LOCAL_RANKS:
        raise ValueError(f"nproc must be at least 1 and at most {MOST_LOCAL_RANKS}, got {nproc}")
    store = host_on_loopback()
    ranks: list[subprocess.Popen[bytes]] = []
    noted: list[int] = []
    with signals_to(noted.append):
        try:
            for rank in range(nproc):
                ranks.append(_start(module, args, rank, nproc, store.port))
            return _supervise(ranks, noted)
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.wait()


@contextmanager
def leading(
    module: str, args: Sequence[str], nproc: int
) -> Iterator[tuple[DistributedEnv, list[subprocess.Popen[bytes]]]]:
    """Make this process rank 0 of a job, and start `python -P -m module args` as the other ranks.

    They get the variables that `launch` gives, and meet in a store on loopback, which this process
    hosts. They are killed at the end of the block; on Linux also when this thread or process ends.

    Args:
        module: See `launch`.
        args: Its arguments.
        nproc: Number of ranks with this one, 2 to 1024.

    Yields:
        The place of this process, for `joined` or `init_process_group`, and the other ranks in
        order. Whoever leads watches them: a rank that ends leaves the others waiting.
    """
    check_type("nproc", nproc, int)
    if not 2 <= nproc <= MOST_LOCAL_RANKS:
        raise ValueError(f"nproc must be at least 2 and at most {MOST_LOCAL_RANKS}, got {nproc}")
    store = host_on_loopback()
    env = DistributedEnv(
        world_size=nproc, local_world_size=nproc, master_port=store.port, store_is_served=True
    )
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(1, nproc):
            ranks.append(_start(module, args, rank, nproc, store.port))
        yield env, ranks
    finally:
        for process in ranks:
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


def _supervise(ranks: list[subprocess.Popen[bytes]], noted: list[int]) -> int:
    failed: int | None = None
    deadline = float("inf")
    forwarded = 0
    insisted = False
    while any(process.poll() is None for process in ranks):
        if failed is None and (failed := _first_failure(ranks, insisted=insisted)) is not None:
            alive = [process for process in ranks if process.poll() is None]
            _report(failed, ranks[failed].returncode, len(alive), noted)
            _signal_all(alive, signal.SIGTERM)
            deadline = min(deadline, time.monotonic() + _FAILURE_GRACE_SECONDS)
        while forwarded < len(noted):
            _signal_all(ranks, noted[forwarded])
            forwarded += 1
            grace = _STOP_GRACE_SECONDS if forwarded == 1 else _SECOND_SIGNAL_GRACE_SECONDS
            deadline = min(deadline, time.monotonic() + grace)
        if time.monotonic() > deadline:
            insisted = failed is None and forwarded > 1
            _signal_all(ranks, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(_POLL_SECONDS)
    if failed is None and (failed := _first_failure(ranks, insisted=insisted)) is not None:
        _report(failed, ranks[failed].returncode, 0, noted)
    if failed is not None:
        return _exit_code(ranks[failed].returncode)
    if insisted:
        return 128 + noted[forwarded - 1]
    return STOPPED if any(process.returncode == STOPPED for process in ranks) else 0


def _first_failure(ranks: list[subprocess.Popen[bytes]], *, insisted: bool) -> int | None:
    """Return the rank that failed; a signal goes first, being the cause of the others' errors.

    A rank that this process killed after a second signal did not fail.
    """
    sound = (0, STOPPED, -signal.SIGKILL) if insisted else (0, STOPPED)
    codes = [(process.poll() or 0, rank) for rank, process in enumerate(ranks)]
    return next((rank for code, rank in sorted(codes) if code not in sound), None)


def _signal_all(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in ranks:
        process.send_signal(number)  # does nothing to one that ended


def _report(rank: int, code: int, others: int, noted: Sequence[int]) -> None:
    if _exit_code(code) - 128 in noted:  # as it was told
        return
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
    rest = f"; ending the other {others}" if others else ""
    with suppress(OSError):  # the terminal may be gone, and the ranks are to save nevertheless
        sys.stderr.write(f"rank {rank} {how}{rest}\n")
        sys.stderr.flush()


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code
