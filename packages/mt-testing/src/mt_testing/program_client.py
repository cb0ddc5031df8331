"""The stand-in of a program: it asks a `Programs` server for a process, and is its proxy.

It is run by `python -IS` as text, without an import of this package, so it starts in milliseconds.
Output goes straight to its own streams; signals are passed on; it ends as the process ends.
"""

from __future__ import annotations

import marshal
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(path: str, arguments: list[str]) -> None:
    """Run `python ARGUMENTS` as a process of the server at `path`, and end with its status."""
    if not arguments or (arguments[0][:1] == "-" and arguments[0] not in ("-m", "-c", "-P")):
        # What the server can't do.
        os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606
    streams = [
        fd for fd in (0, 1, 2) if _is_open(fd)
    ]  # before a socket takes a closed one's number
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    request = marshal.dumps((arguments, os.getcwd(), dict(os.environ), streams))
    socket.send_fds(server, [len(request).to_bytes(4, "little")], streams)
    server.sendall(request)
    for number in PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: server.send(bytes([number])))
    status = server.recv(4)
    if len(status) < 4:
        sys.exit("the server of programs has ended")
    code = int.from_bytes(status, "little", signed=True)
    if code < 0:  # a signal ended it, and so ends this process
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
