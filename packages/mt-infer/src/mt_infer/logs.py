"""Logs: a line of JSON for each event, without prompts, answers and keys."""

from __future__ import annotations

import json
import logging
import time
from traceback import format_tb
from typing import TextIO

_USUAL = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "color_message"}
_LONGEST, _DEEP = 4000, 20


class JsonFormatter(logging.Formatter):
    """A formatter that writes a record as a line of ASCII, with all other characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage()[:_LONGEST],
        }
        line |= {name: x for name, x in record.__dict__.items() if name not in _USUAL}
        if record.exc_info:
            kind, _, where = record.exc_info  # the error's text may have what a client has sent
            line |= {"error": getattr(kind, "__name__", ""), "traceback": format_tb(where)[-_DEEP:]}
        return json.dumps(line, default=str)


def log_to(stream: TextIO) -> None:
    """Write the logs of the server and its libraries to a stream, as JSON lines."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(capture=True)
    logging.getLogger("mt_infer").setLevel(logging.INFO)
