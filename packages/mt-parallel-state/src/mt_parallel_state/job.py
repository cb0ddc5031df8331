"""Joins the ranks of one job, and leaves them."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from mt_files import UserError, check_type

from mt_parallel_state.environment import DistributedEnv
from mt_parallel_state.groups import nccl_options
from mt_parallel_state.launcher import MOST_LOCAL_RANKS
from mt_parallel_state.store import JoinError, first_line, meet

_RELEASE_SECONDS = 0.05
_YIELD_SECONDS = 3.0
# What gloo, NCCL and the store say when the other end is gone. They have no type for it.
_LOSS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "remote process exited",
    "failed to recv, got 0 bytes",
)


# What torch says where a host has no memory left, or others fill a GPU; it has no type for it.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


class PeerLostError(UserError, dist.DistError):
    """Another rank of this job ended, so this one can't go on."""


def is_peer_loss(error: BaseException | None) -> bool:
    """Return whether an error, or what led to it, only says that another rank is gone."""
    if error is not None:
        check_type("error", error, BaseException)
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, PeerLostError):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _LOSS):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or what caused it, is a device or a host that ran out of memory."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY):
            return True
        error = error.__cause__
    return False


def must_launch(nproc: int, env: DistributedEnv) -> bool:
    """Return whether `nproc` local ranks are still to be started, and check that they can be.

    Args:
        nproc: The number of processes from the command line, 1 by default.
        env: This process's place; a launcher may have started the processes already.

    Raises:
        ValueError: The number is below 1, contradicts the launcher, or exceeds this machine's GPUs.
    """
    check_type("nproc", nproc, int)
    check_type("env", env, DistributedEnv)
    if not 1 <= nproc <= MOST_LOCAL_RANKS:
        raise ValueError(f"--nproc {nproc}: use 1 or more, at most {MOST_LOCAL_RANKS}")
    if env.world_size > 1:
        if nproc not in (1, env.world_size):
            raise ValueError(
                f"--nproc {nproc} under {env.launcher}, which started {env.world_size} processes: "
                f"leave --nproc out, or let {env.launcher} start {nproc}"
            )
        return False
    gpus = torch.cuda.device_count() if nproc > 1 and torch.cuda.is_available() else nproc
    if nproc > gpus:
        raise ValueError(
            f"--nproc {nproc} needs a GPU for each process, and this machine shows {gpus}; use "
            "fewer processes, or set CUDA_VISIBLE_DEVICES='' to run on the CPU"
        )
    return nproc > 1


@contextmanager
def joined(env: DistributedEnv, *, timeout: timedelta | None = None) -> Iterator[torch.device]:
    """Join the job of `env` while the block runs, and yield this rank's device.

    A job that the caller has joined already is used and not left. In ours, an error that only says
    that another rank is gone becomes a `PeerLostError` of one line. This rank then waits a moment
    before it raises, since a launcher that sees the other rank's end ends this one too: only the
    rank that failed is heard. The same holds for a failure to join, which rank 0 of each node tells
    at once.

    Args:
        env: From `detect_env`.
        timeout: How long joining, and later a collective, may take; `None` is torch's default.

    Raises:
        JoinError: The ranks did not come together, or there is no GPU for this one.
        PeerLostError: Another rank ended while the block ran.
    """
    if dist.is_initialized():
        yield _current_device()
        return
    try:
        device = init_process_group(env, timeout=timeout)
    except JoinError:
        if env.local_rank > 0:
            _wait_for_the_end()
        raise
    try:
        yield device
    except Exception as error:
        if env.world_size == 1 or not is_peer_loss(error):
            raise
        _wait_for_the_end()
        raise PeerLostError(
            f"rank {env.rank} lost another rank, which ended first: {first_line(error)}"
        ) from error
    finally:
        leave_process_group()


def init_process_group(env: DistributedEnv, *, timeout: timedelta | None = None) -> torch.device:
    """Join the default process group and return the device of this rank.

    The backend is gloo without CUDA, `cpu:gloo,cuda:nccl` with it. A world of one rank needs no
    process group and gets none. A rank that waits for others for long says for whom. A store that
    rank 0 hosts under a loopback address listens on loopback only.

    Args:
        env: From `detect_env`.
        timeout: How long joining, and later a collective, may take; `None` is torch's default.

    Raises:
        JoinError: The ranks did not come together, or there is no GPU for this one.
    """
    check_type("env", env, DistributedEnv)
    device = _device(env)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if env.world_size > 1:
        _join(env, device, timeout)
    return device


def _device(env: DistributedEnv) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1 and env.launcher == "slurm":  # --gpus-per-task=1 shows each task its own as 0
        return torch.device("cuda", 0)
    if env.local_rank >= count:
        raise JoinError(
            f"local rank {env.local_rank} has no GPU: this node shows {count}; start at most that "
            "many ranks per node"
        )
    return torch.device("cuda", env.local_rank)


def _join(env: DistributedEnv, device: torch.device, timeout: timedelta | None) -> None:
    store = meet(env, timeout or dist.default_pg_timeout)
    backend, options = "gloo", None
    if device.type == "cuda":
        backend, options = "cpu:gloo,cuda:nccl", nccl_options(None, timeout)
    # Only where connecting is lazy may the device be told: elsewhere it makes every later group a
    # split of the world's communicator, which all ranks would have to take part in. Untold, this
    # torch would guess from LOCAL_RANK or the global rank, which srun can make wrong.
    lazy = getattr(options, "lazy_init", False)
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default_pg", store),
            rank=env.rank,
            world_size=env.world_size,
            timeout=timeout,
            pg_options=options if lazy else None,
            device_id=device if lazy else None,
        )
    except RuntimeError as error:
        raise JoinError(f"rank {env.rank} can't connect: {first_line(error)}") from error


def leave_process_group() -> None:
    """Leave the default process group so that this process can end; do nothing without one.

    The threads of gloo let go of a collective's tensors a moment after it is done, and what holds a
    group in a reference cycle keeps them running. A process whose interpreter ends meanwhile is
    aborted now and then ("terminate called without an active exception"). So cycles are collected
    first, and the threads get their moment.
    """
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
        time.sleep(_RELEASE_SECONDS)


def _current_device() -> torch.device:
    if torch.cuda.is_available() and "cuda:nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _wait_for_the_end() -> None:
    """Give the launcher time to end this process; come back if it does not."""
    in_main = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, signal.SIG_DFL) if in_main else None
    time.sleep(_YIELD_SECONDS)
    if previous is not None:
        signal.signal(signal.SIGTERM, previous)
