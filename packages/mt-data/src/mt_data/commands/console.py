"""Lines of text for a person at a console."""

from __future__ import annotations

import sys
from typing import Any


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal."""
    return stream is not None and not stream.closed and stream.isatty()


def say(text: str, *, stream: Any = None) -> None:
    """Write a line; characters that the console can't show are escaped."""
    stream = stream or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
