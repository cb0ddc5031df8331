"""The server of programs: it has imported torch, and forks a process for each request."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import marshal
import multiprocessing.util
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1


def serve(listener_fd: int, control_fd: int, path: list[str]) -> None:
    """Fork programs until the control connection closes; `path` is a fresh interpreter's."""
    listener, control = socket.socket(fileno=listener_fd), socket.socket(fileno=control_fd)
    for name in _message(control, _read(control, 4)):
        importlib.import_module(name)
    wake_read, wake_write = socket.socketpair()
    for end in (wake_read, wake_write):
        os.set_blocking(end.fileno(), False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write.fileno())
    gc.collect()
    gc.freeze()  # a collection in a program then does not copy the pages of every module
    running: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        private = [selector, listener, control, wake_read, wake_write]
        for end in (listener, control, wake_read):
            selector.register(end, selectors.EVENT_READ)
        control.send(b"\0")  # ready
        while True:
            for key, _ in selector.select():
                if key.fileobj is control:
                    return _end(running)
                if key.fileobj is wake_read:
                    with contextlib.suppress(BlockingIOError):
                        wake_read.recv(4096)
                    _reap(running, selector)
                elif key.fileobj is listener:
                    client = listener.accept()[0]
                    if (pid := _start(client, [*private, *running.values()], path)) is not None:
                        running[pid] = client
                        selector.register(client, selectors.EVENT_READ, pid)
                elif key.data in running:
                    _pass_on(key.data, running[key.data], selector)


def _start(client: socket.socket, private: Sequence[Any], path: list[str]) -> int | None:
    """Read a request and fork its process; returns the process id, or None if nobody asks."""
    try:
        head, fds, *_ = socket.recv_fds(client, 4, 3)
        arguments, directory, environ, streams = _message(client, head)
    except (EOFError, OSError, ValueError):
        client.close()
        return None
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        return pid
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for end in (client, *private):
        end.close()
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _take_streams(dict(zip(streams, fds, strict=True)))
    _run(lambda: _become(arguments, directory, environ, path))
    return None


def _take_streams(given: dict[int, int]) -> None:
    """Make descriptors the standard streams; one that is not given is closed, as for its client."""
    for stream in (0, 1, 2):
        if stream not in given:
            os.close(stream)
        elif given[stream] != stream:
            os.dup2(given[stream], stream)
    for fd in {*given.values()} - {0, 1, 2}:
        os.close(fd)


def _open_streams() -> None:
    """Open the standard streams as the interpreter does at its start; None for a closed one."""
    rest = {"closefd": False, "encoding": "utf-8"}
    for fd, name, mode, more in (
        (0, "stdin", "r", {}),
        (1, "stdout", "w", {}),
        (2, "stderr", "w", {"errors": "backslashreplace", "buffering": 1}),
    ):
        try:
            stream = open(fd, mode, **rest, **more)  # noqa: SIM115 - until the end
        except OSError:
            stream = None
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _pass_on(pid: int, client: socket.socket, selector: selectors.BaseSelector) -> None:
    """Send a program the signals that its stand-in was sent; end it with its stand-in."""
    try:
        numbers = client.recv(16)
    except OSError:
        numbers = b""
    if not numbers:
        selector.unregister(client)
        _signal_group(pid, signal.SIGKILL)
    for number in numbers:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def _reap(running: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    """Send the exit codes of finished programs to their stand-ins."""
    for pid in list(running):
        found, status = os.waitpid(pid, os.WNOHANG)
        if not found:
            continue
        client = running.pop(pid)
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(client)
        with contextlib.suppress(OSError):
            code = os.waitstatus_to_exitcode(status)
            client.send(code.to_bytes(4, "little", signed=True))
        client.close()


def _end(running: dict[int, socket.socket]) -> None:
    for pid in running:
        _signal_group(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _message(connection: socket.socket, head: bytes) -> Any:
    """Read the message after `head`, its size; our own processes wrote it."""
    return marshal.loads(_read(connection, int.from_bytes(head, "little")))  # noqa: S302


def _read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise EOFError
        found += part
    return found


def _become(arguments: list[str], directory: str, environ: dict[str, str], path: list[str]) -> None:
    """Be `python ARGUMENTS`, started in a directory with an environment."""
    _open_streams()
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(directory)
    torch = sys.modules.get("torch")
    if torch is not None and environ.get("OMP_NUM_THREADS", "").isdigit():
        torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
    subprocess.Popen = _ForkingPopen
    multiprocessing.util.spawnv_passfds = _spawn
    interpret(arguments, path)


def interpret(arguments: list[str], path: list[str]) -> None:
    """Do what the interpreter does with its arguments: a module, a text or a file."""
    is_safe = arguments[0] == "-P"
    first, *rest = arguments[1:] if is_safe else arguments
    if first == "-m":
        sys.path[:] = path if is_safe else [os.getcwd(), *path]
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    if first == "-c":
        name, text, sys.argv = "<string>", rest[0], ["-c", *rest[1:]]
        folder = ""
    else:
        with open(first, encoding="utf-8") as file:
            name, text, sys.argv = first, file.read(), [first, *rest]
        folder = os.path.dirname(os.path.realpath(first))
    sys.path[:] = path if is_safe else [folder, *path]
    main = types.ModuleType("__main__")
    if first != "-c":
        main.__file__ = name
    sys.modules["__main__"] = main
    exec(compile(text, name, "exec"), main.__dict__)  # noqa: S102 - what an interpreter does


def _run(body: Callable[[], None]) -> None:
    """Run a program's body and end the process as an interpreter would."""
    code: object = 0
    try:
        body()
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - the interpreter prints any exception
        traceback.print_exc()
        code = 1
    if not isinstance(code, int | None):
        sys.stderr.write(f"{code}\n")
        code = 1
    code = code or 0
    with contextlib.suppress(BaseException):
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] - waits for threads
        atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except OSError:
        code = code or 120
    os._exit(code & 0xFF)


def _fork(
    arguments: list[str], keep: set[int], environ: dict[str, str], setup: Callable[[], None]
) -> int:
    """Fork this process and be `python ARGUMENTS` in it; returns the process id.

    The copy keeps the imported modules, and loses files, finalizers and exit functions.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        pid = os.fork()
    if pid:
        return pid
    setup()
    _open_streams()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in [int(name) for name in os.listdir("/dev/fd")]:
        if fd > 2 and fd not in keep and fd != null:  # the number stays taken: objects close it
            with contextlib.suppress(OSError):
                os.dup2(null, fd)
    for name in [name for name in sys.modules if name.endswith(".__main__")]:
        del sys.modules[name]  # of the program that starts this one
    atexit._clear()
    weakref.finalize._registry.clear()  # pyright: ignore[reportAttributeAccessIssue]
    weakref.finalize._registered_with_atexit = False  # pyright: ignore[reportAttributeAccessIssue]
    multiprocessing.util._finalizer_registry.clear()  # pyright: ignore[reportAttributeAccessIssue]
    os.environ.clear()
    os.environ.update(environ)
    path = [entry for entry in sys.path if entry]
    _run(lambda: interpret(arguments, path))
    raise AssertionError("a program came back")


def _spawn(path: Any, args: Any, passfds: Any) -> int:
    """Stand in for what multiprocessing starts an interpreter with."""
    arguments = [os.fsdecode(argument) for argument in args[1:]]
    while arguments[0] not in ("-c", "-m"):  # flags of the parent
        arguments.pop(0)
    return _fork(arguments, set(passfds), dict(os.environ), lambda: None)


class _ForkingPopen(subprocess.Popen):
    """A `Popen` that starts this interpreter as a fork of the process itself."""

    def _execute_child(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, *rest: Any
    ) -> None:
        (cwd, env, _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite) = rest[:11]
        alone = rest[-2]  # start_new_session
        is_python = isinstance(args, Sequence) and args[:1] == [sys.executable]
        if not is_python or shell or preexec_fn or (args[1][:1] == "-" and args[1] not in _KNOWN):
            super()._execute_child(  # pyright: ignore[reportAttributeAccessIssue]
                args, executable, preexec_fn, close_fds, pass_fds, *rest
            )
            return

        def setup() -> None:
            given = {0: p2cread, 1: c2pwrite, 2: errwrite}
            for stream, fd in given.items():
                if fd not in (-1, stream):
                    os.dup2(fd, stream)
            if alone:
                os.setsid()
            if cwd is not None:
                os.chdir(cwd)

        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
        environ = dict(os.environ if env is None else env)
        self.pid = _fork([os.fsdecode(a) for a in args[1:]], set(pass_fds), environ, setup)
        self._child_created = True
        self._close_pipe_fds(  # pyright: ignore[reportAttributeAccessIssue]
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        )


_KNOWN = ("-m", "-c", "-P")
