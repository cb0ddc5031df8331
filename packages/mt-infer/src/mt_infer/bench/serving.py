"""A server of a folder, for as long as it is measured."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mt_infer.client import ServerError

_LISTENING = re.compile(r"listening on (http://\S+)")
_DRAINED = 60.0  # seconds


@contextmanager
def served(folder: str, options: Sequence[str] = ()) -> Iterator[str]:
    """Start `mt-infer serve` for a folder, give its address, and end it.

    Args:
        folder: The folder.
        options: Further options of the command.

    Raises:
        ServerError: It ends before it is ready; its own message is on standard error.
    """
    command = [sys.executable, "-m", "mt_infer", "serve", folder, "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            yield _address(process)
        finally:
            process.terminate()
            try:
                process.wait(_DRAINED)
            except subprocess.TimeoutExpired:
                process.kill()


def _address(process: subprocess.Popen[str]) -> str:
    for line in process.stdout or ():
        if found := _LISTENING.search(line):
            return found[1]
    raise ServerError("the server ended before it was ready; its message is above")
