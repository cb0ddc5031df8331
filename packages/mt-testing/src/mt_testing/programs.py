"""Programs that start in milliseconds, as forks of a process with torch loaded."""

from __future__ import annotations

import marshal
import os
import shutil
import socket
import sys
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

from mt_testing.errors import PoolError
from mt_testing.forkserver import ForkServer

_CLIENT = Path(__file__).with_name("program_client.py")
_OURS = "mt-*"


class Programs:
    """Stand-ins for `python` and the installed `mt-*` programs, in a folder.

    A stand-in is a small program that asks a server for a process, gives it its arguments, streams,
    environment and working directory, passes signals on, and ends as the process ends. The process
    is a fork of the server, so it does not import again what the server has imported. The same
    holds for interpreters that it starts: the ranks of a launcher or of `multiprocessing`.

    A test of how a process starts, or of what it imports, needs the real program. A stand-in
    and its program have different process ids. Use it as a context manager, or call `close`.

    Attributes:
        folder: The folder with the stand-ins, to be put in front of PATH.
        python: The stand-in for this interpreter: a module, a file or `-c` with a text.
    """

    def __init__(self, server: ForkServer, preload: Sequence[str], timeout: float) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="programs_"))  # memory may refuse to execute
        address = os.path.join(server.directory, self.folder.name)
        self.python = self.folder / "python"
        self._control, theirs = socket.socketpair()
        self._finalizer = weakref.finalize(self, _close, self._control, self.folder)
        with theirs, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(64)
            server.fork([listener.fileno(), theirs.fileno()], role="programs")
        self._import(preload, timeout)
        _write(self.python, address, [])
        for program in sorted(Path(sys.executable).parent.glob(_OURS)):
            _write(self.folder / program.name, address, [str(program)])

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _import(self, names: Sequence[str], timeout: float) -> None:
        message = marshal.dumps(list(names))
        self._control.sendall(len(message).to_bytes(4, "little") + message)
        self._control.settimeout(timeout)
        try:
            is_ready = self._control.recv(1)
        except TimeoutError as error:
            text = f"the server of programs did not import {list(names)} within {timeout:.0f} s"
            raise PoolError(text) from error
        if not is_ready:
            raise PoolError("the server of programs ended; its last words are on stderr")

    def environment(self) -> dict[str, str]:
        """Return this process's environment with the stand-ins in front of PATH."""
        return {**os.environ, "PATH": f"{self.folder}{os.pathsep}{os.environ.get('PATH', '')}"}

    def close(self) -> None:
        """End the server and all its programs; safe to call twice."""
        self._finalizer()


def _close(control: socket.socket, folder: Path) -> None:
    control.close()
    shutil.rmtree(folder, ignore_errors=True)


def _write(path: Path, address: str, first: list[str]) -> None:
    """Write a stand-in, whose arguments come behind `first`."""
    text = f"#!{sys.executable} -IS\n{_CLIENT.read_text(encoding='utf-8')}"
    path.write_text(f"{text}\n\nmain({address!r}, {first!r} + sys.argv[1:])\n", encoding="utf-8")
    path.chmod(0o700)
