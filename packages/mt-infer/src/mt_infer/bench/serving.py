"""A server of a folder for the duration of a measurement."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from mt_infer.client import ServerError

_LISTENING = re.compile(r"listening on (http://\S+)")
_DRAINED = 60.0  # seconds


@contextmanager
def served(folder: str, options: Sequence[str] = ()) -> Iterator[str]:
    """Start `mt-infer serve` for a folder, yield its address, and end it.

    Args:
        folder: The folder.
        options: Further options of the command.

    Raises:
        ServerError: The server ends before it is ready; the error has its last message.
    """
    command = [sys.executable, "-m", "mt_infer", "serve", folder, "--port", "0", *options]
    with tempfile.TemporaryFile("w+") as log:  # a line for each request
        how = {"stdout": subprocess.PIPE, "stderr": log, "text": True}
        with subprocess.Popen(command, **how) as process:  # noqa: S603 - our own command
            try:
                yield _address(process, log)
            finally:
                process.terminate()
                try:
                    process.wait(_DRAINED)
                except subprocess.TimeoutExpired:
                    process.kill()


def _address(process: subprocess.Popen[str], log: IO[str]) -> str:
    for line in process.stdout or ():
        if found := _LISTENING.search(line):
            return found[1]
    log.seek(0)
    said = log.read().strip().splitlines()
    reason = said[-1].removeprefix("mt-infer: ") if said else "it said nothing"
    raise ServerError(f"the server ended before it was ready: {reason[:1000]}")
