"""The loop of one rank: receive a call, run it in a fresh process group, answer, clean up."""

from __future__ import annotations

import datetime
import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from mt_testing.protocol import FINISH, NOTES_VARIABLE, Call
from mt_testing.shipping import dump_result

SEED = 1234
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGALRM)


def run_worker(connection: Connection, notes_fd: int) -> None:
    """Serve calls until the parent closes the connection."""
    faulthandler.enable(file=notes_fd)
    faulthandler.register(signal.SIGUSR2, file=notes_fd, all_threads=True)
    rank = pickle.loads(connection.recv_bytes())  # noqa: S301
    gc.freeze()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        if message == FINISH:
            _reset(handlers)
            answer = FINISH
        else:
            answer = _answer(pickle.loads(message), rank, notes_fd)  # noqa: S301
            sys.stdout.flush()  # so that a failed test shows the output
        try:
            connection.send_bytes(answer)
        except BrokenPipeError:
            return


def _answer(call: Call, rank: int, notes_fd: int) -> bytes:
    try:
        with warnings.catch_warnings():
            _prepare(call, rank, notes_fd)
            fn, args = pickle.loads(call.payload)  # noqa: S301
            result = fn(*args)
        return pickle.dumps(("ok", _dump(result)))
    except BaseException as error:  # noqa: BLE001 - SystemExit in a test is a failure of the test
        # The frames of this file would not help the reader of a failed test.
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        text = "".join(traceback.format_exception(type(error), error, frames))
        summary = "".join(traceback.format_exception_only(error)).strip()
        return pickle.dumps(("error", type(error).__name__, summary, text))


def _dump(result: Any) -> bytes:
    try:
        return dump_result(result)
    except Exception as error:
        raise TypeError(
            f"a result of type {type(result).__name__} cannot be sent back: {error}. "
            "Return tensors and plain values"
        ) from error


def _prepare(call: Call, rank: int, notes_fd: int) -> None:
    os.environ.clear()
    os.environ.update(call.environ)
    os.environ[NOTES_VARIABLE] = str(notes_fd)
    os.chdir(call.directory)
    sys.path[:] = call.sys_path
    _reset_torch()
    if call.backend == "nccl":
        if torch.cuda.device_count() < call.world_size:
            raise RuntimeError(
                f"backend 'nccl' needs one GPU per rank: {call.world_size} ranks, "
                f"{torch.cuda.device_count()} visible GPUs; use fewer ranks or backend='gloo'"
            )
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if call.backend == "nccl" else "gloo",
        store=dist.FileStore(call.store, call.world_size),
        rank=rank,
        world_size=call.world_size,
        timeout=datetime.timedelta(seconds=call.timeout),
    )


def _reset_torch() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.autograd.set_detect_anomaly(False)
    torch.use_deterministic_algorithms(mode=False)
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(SEED)
    random.seed(SEED)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(SEED)


def _reset(handlers: dict[signal.Signals, Any]) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    gc.collect()
