"""Lines of text for a person at a console."""

from __future__ import annotations

from typing import Any

from mt_files import say as say


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal."""
    return stream is not None and not stream.closed and stream.isatty()
