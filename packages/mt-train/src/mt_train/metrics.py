"""metrics.jsonl: one JSON object a line, the record everything else is drawn from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class MetricsFile:
    """Appends records; on resume it first forgets what a lost part of the run wrote.

    Args:
        path: The file, created if missing.
        resume_step: Records of later steps are dropped.
        evaluates_again: Whether the evaluation of `resume_step` is dropped too.
    """

    def __init__(self, path: Path, *, resume_step: int, evaluates_again: bool = False) -> None:
        kept = [
            record
            for record in read_metrics(path)
            if record["step"] <= resume_step
            and not (evaluates_again and record["step"] == resume_step and "val_loss" in record)
        ]
        scratch = path.with_name(f".{path.name}.tmp")
        scratch.write_text("".join(json.dumps(record) + "\n" for record in kept))
        os.replace(scratch, path)
        self._file = path.open("a", buffering=1)

    def write(self, record: Record) -> None:
        """Append one record; it must have a `step`."""
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> Iterator[Record]:
    """Read the records of a metrics file; a line cut off by a crash ends the reading."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return
