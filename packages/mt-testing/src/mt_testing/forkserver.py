"""A server process that imports torch and the installed packages once, and then forks ranks.

Unlike `multiprocessing`'s fork server, it reports packages that fail to import, never imports the
parent's `__main__` again, reports how each rank ended, and ends all ranks and their children when
its parent ends for any reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import Literal

from mt_testing.errors import PoolError, signal_name

# Imports that a rank would otherwise pay for at first use; dynamo, which torch.optim needs, takes
# seconds alone.
TORCH_MODULES = (
    "torch",
    "torch._dynamo",
    "torch.optim",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "pytest",
)
PACKAGE_PREFIX = "mt_"

# One thread per process keeps the server safe to fork. The CUDA check through NVML lets a package
# ask `torch.cuda.is_available()` at import without creating a context no child could use.
SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}

_PR_SET_PDEATHSIG = 1
_BOOT = (
    "import sys, json; fresh = sys.path[1:]; sys.path[:] = json.loads(sys.argv[2]); "
    "from mt_testing.forkserver import serve; "
    "serve(int(sys.argv[1]), json.loads(sys.argv[3]), fresh)"
)


class ForkServer:
    """The parent's handle of the server process.

    Args:
        preload: Modules to import besides torch and every installed `mt_*` package.

    Attributes:
        control: Connection, readable when the server has a message for `pump`.
        ended: Exit code, or minus the signal's number, of each ended rank by process id.
        preload_errors: Traceback of each module that failed to import.
        directory: A folder that the server removes when it ends.
    """

    def __init__(self, preload: Iterable[str] = ()) -> None:
        if os.name != "posix":
            raise PoolError(
                f"the rank pool forks processes and needs Linux or macOS, not {os.name}"
            )
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and arguments
                [
                    sys.executable,
                    "-c",
                    _BOOT,
                    str(theirs.fileno()),
                    json.dumps([str(entry) for entry in sys.path]),
                    json.dumps(list(preload)),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **SERVER_ENVIRONMENT},
                start_new_session=True,
            )
        self.control = Connection(ours.detach())
        self.ended: dict[int, int] = {}
        self.preload_errors: dict[str, str] = {}
        self.directory = ""
        self._forked: int | None = None
        self._owner = os.getpid()

    def wait_ready(self, timeout: float) -> None:
        """Wait until everything is imported.

        Raises:
            PoolError: The server ended, or took longer than `timeout` seconds.
        """
        if not self.control.poll(timeout):
            raise PoolError(f"the fork server did not import torch within {timeout:.0f} s")
        self._receive()

    def pump(self, timeout: float = 0.0) -> None:
        """Take the server's messages; wait at most `timeout` seconds for the first.

        Raises:
            PoolError: The server has ended.
        """
        while self.control.poll(timeout):
            self._receive()
            timeout = 0.0

    def fork(
        self, fds: Iterable[int], *, role: Literal["rank", "programs"] = "rank", timeout: float = 60
    ) -> int:
        """Fork a process that inherits two descriptors, and return its process id.

        Args:
            fds: For a rank its connection and its notes; for a server of programs its listener and
                its control connection.
            role: What the process becomes.
            timeout: Time limit in seconds.

        Raises:
            PoolError: The server has ended or does not answer.
        """
        self._forked = None
        try:
            self.control.send(("fork", role))
            for fd in fds:
                reduction.send_handle(self.control, fd, self._process.pid)
        except OSError as error:
            raise self._gone() from error
        deadline = time.monotonic() + timeout
        while self._forked is None:
            if time.monotonic() > deadline:
                raise PoolError(f"the fork server did not fork a rank within {timeout:.0f} s")
            self.pump(deadline - time.monotonic())
        return self._forked

    def signal(self, pid: int, number: int, *, whole_group: bool = False) -> None:
        """Send a signal to a rank, or to it and all its descendants.

        Raises:
            PoolError: The server has ended.
        """
        try:
            self.control.send(("signal", pid, number, whole_group))
        except OSError as error:
            raise self._gone() from error

    def _receive(self) -> None:
        try:
            kind, *values = self.control.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if kind == "exit":
            self.ended[values[0]] = values[1]
        elif kind == "forked":
            self._forked = values[0]
        else:
            self.preload_errors, self.directory = values

    def _gone(self) -> PoolError:
        code = self._process.wait(timeout=10)
        fate = signal_name(-code) if code < 0 else f"exit code {code}"
        return PoolError(f"the fork server ended with {fate}; its last words are on stderr")

    def close(self) -> None:
        """End the server and every process it forked; safe to call twice."""
        if os.getpid() != self._owner:  # a fork of the parent owns none of this
            return
        self.control.close()
        if not self.directory:  # still importing: nothing to clean, and it would not notice yet
            self._process.kill()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(control_fd: int, preload: list[str], fresh_path: list[str]) -> None:
    """Run the server until the parent closes the control connection.

    `fresh_path` is the `sys.path` of a fresh interpreter, without what the parent added to it.
    """
    control = Connection(control_fd)
    errors = _preload([*TORCH_MODULES, *_our_packages(), *preload])
    wake_read, wake_write = socket.socketpair()
    os.set_blocking(wake_read.fileno(), False)
    os.set_blocking(wake_write.fileno(), False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write.fileno())
    directory = tempfile.mkdtemp(prefix="mt_testing_", dir=_memory_folder())
    gc.collect()
    gc.freeze()  # a collection in a rank then does not copy the pages of every imported module
    children: set[int] = set()
    with contextlib.suppress(EOFError, OSError):
        control.send(("ready", errors, directory))
        while True:
            ready = wait([control, wake_read])
            if wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    wake_read.recv(4096)
                for pid, status in _reap(children):
                    control.send(("exit", pid, status))
            if control in ready:
                private_fds = (control_fd, wake_read.fileno(), wake_write.fileno())
                _obey(control, children, private_fds, fresh_path)
    for pid in children:
        _signal_group(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)  # the libraries' own clean-up prints, and there is nothing left to clean


def _obey(
    control: Connection, children: set[int], private_fds: tuple[int, ...], fresh_path: list[str]
) -> None:
    kind, *values = control.recv()
    if kind == "signal":
        pid, number, whole_group = values
        if pid in children:  # ended children are reaped only here, so the id is not reused yet
            if whole_group:
                _signal_group(pid, number)
            else:
                os.kill(pid, number)
        return
    first, second = reduction.recv_handle(control), reduction.recv_handle(control)
    pid = os.fork()
    if pid == 0:
        role = {"rank": _be_rank, "programs": lambda a, b: _serve_programs(a, b, fresh_path)}
        _become(lambda: role[values[0]](first, second), private_fds)
    os.close(first)
    os.close(second)
    children.add(pid)
    control.send(("forked", pid))


def _be_rank(connection_fd: int, notes_fd: int) -> None:
    from mt_testing.worker import run_worker

    run_worker(Connection(connection_fd), notes_fd)


def _serve_programs(listener_fd: int, control_fd: int, fresh_path: list[str]) -> None:
    from mt_testing.program_server import serve

    serve(listener_fd, control_fd, fresh_path)


def _become(body: Callable[[], None], private_fds: tuple[int, ...]) -> None:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in private_fds:
            os.close(fd)
        os.setsid()  # its own process group, so that its children can be ended with it
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        body()
        code = 0
    except BaseException:  # noqa: BLE001 - the last frame of a forked process
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _reap(children: set[int]) -> list[tuple[int, int]]:
    ended = []
    for pid in list(children):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            children.discard(pid)
            _signal_group(pid, signal.SIGKILL)  # processes that the rank left running
            ended.append((pid, os.waitstatus_to_exitcode(status)))
    return ended


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _memory_folder() -> str | None:
    folder = "/dev/shm"  # noqa: S108 - mkdtemp makes a private folder in it
    return folder if os.access(folder, os.W_OK) else None


def _our_packages() -> list[str]:
    found = {module.name for module in pkgutil.iter_modules(sys.path) if module.ispkg}
    return sorted(name for name in found if name.startswith(PACKAGE_PREFIX))


def _preload(names: list[str]) -> dict[str, str]:
    errors = {}
    for name in names:
        threads = threading.active_count()
        try:
            importlib.import_module(name)
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001 - a broken package must not cost the pool
            errors[name] = traceback.format_exc()
            continue
        if threading.active_count() > threads:
            errors[name] = f"importing {name} starts threads, which do not survive in the ranks"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        errors["torch.cuda"] = "a preloaded module initialised CUDA; no rank can use it any more"
    return errors
