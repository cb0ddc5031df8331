"""Output of the command, to streams that may be closed or full, in any encoding."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mt_parallel_state import DistributedEnv

_MAX_MESSAGE = 2000


def open_streams() -> bool:
    """Replace streams that the shell closed (`>&-`), and return whether stdout was open."""
    has_stdout = sys.stdout is not None
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - to the end
    return has_stdout


def say(message: str) -> None:
    """Write a line to stderr; a closed stderr is no error."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"mt-infer: {bounded(message)}\n")


@contextlib.contextmanager
def told_once(env: DistributedEnv) -> Iterator[None]:
    """Let one rank of each node report an error that all its ranks find."""
    # The launcher ends all ranks as soon as one exits, so who is there later has its own error.
    try:
        yield
    except Exception:
        if env.local_rank > 0:
            time.sleep(2)
        raise


def keep_quiet(_: str) -> None:
    """Write nothing, since another rank writes the same message."""


def bounded(text: str) -> str:
    """Return a message cut to a readable length."""
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."


def check_printable(*, has_stdout: bool) -> None:
    """Check that the result can be printed.

    Raises:
        OSError: Standard output is closed.
    """
    if not has_stdout:
        raise OSError("standard output is closed, so nothing can be printed; open or redirect it")


def print_text(text: str) -> None:
    """Write to stdout in any encoding, even if the reader has closed the pipe."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as error:
        # The rest of the buffer would fail again when the interpreter exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            error.filename = "standard output"
            raise
