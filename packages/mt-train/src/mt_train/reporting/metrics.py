"""metrics.jsonl: one JSON object a line, the source of all other reports."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mt_files import FileError, MissingFileError, open_file, parse_json, writing

Record = dict[str, Any]

_LONGEST_LINE = 1 << 20  # numbers of thousands of layers
_NUMBERS = ("loss", "val_loss", "bits_per_byte")  # and all that end with _loss
_MAX_STEP = 10**18


class MetricsFile:
    """A file to append records to; on resume it first drops the records of a lost part of the run.

    Damaged lines, for example from a failing disk, move to `metrics.damaged` beside the file. An
    incomplete last line, for example after a kill, is dropped.

    Args:
        path: The file, created if missing.
        resume_step: Records of later steps are dropped.
        evaluates_again: Whether the evaluation of `resume_step` is dropped too.

    Attributes:
        damaged: Numbers of the damaged lines.

    Raises:
        FileError: The file is not a regular file in its folder, or can't be written.
    """

    def __init__(self, path: Path, *, resume_step: int, evaluates_again: bool = False) -> None:
        self._path = path
        self.damaged: list[int] = []
        with writing(path) as kept:
            for number, line in enumerate(_lines(path), 1):
                record = parse_record(line)
                if record is None:
                    if line.endswith(b"\n"):
                        self._set_aside(number, line)
                    continue
                again = evaluates_again and record["step"] == resume_step and "val_loss" in record
                if record["step"] <= resume_step and not again:
                    kept.write(line.rstrip(b"\n") + b"\n")
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(path, flags), "a", buffering=1, encoding="utf-8")

    def _set_aside(self, number: int, line: bytes) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        aside = os.open(self._path.with_suffix(".damaged"), flags, 0o666)
        with os.fdopen(aside, "ab") as file:
            file.write(line)
        self.damaged.append(number)

    def write(self, record: Record) -> None:
        """Append one record; it must have a `step`. A number that is not finite becomes null."""
        plain = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        self._file.write(json.dumps(plain) + "\n")

    def sync(self) -> None:
        """Wait until the records are on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> Iterator[Record]:
    """Yield the records of a metrics file, and skip damaged lines.

    Raises:
        FileError: The file is not a regular file in its folder.
    """
    for line in _lines(path):
        record = parse_record(line)
        if record is not None:
            yield record


def parse_record(line: bytes) -> Record | None:
    """Return the record in a line, or None if there is none.

    A record is an object with a `step` of 0 or more; its losses are numbers or null.
    """
    try:
        record = parse_json(line, name="metrics")
    except FileError:
        return None
    if not isinstance(record, dict):
        return None
    step = record.get("step")
    if type(step) is not int or not 0 <= step < _MAX_STEP:
        return None
    kinds = ((name.partition("/")[0], value) for name, value in record.items())
    values = [value for kind, value in kinds if kind in _NUMBERS or kind.endswith("_loss")]
    return record if all(type(v) in (int, float, type(None)) for v in values) else None


def other_losses(record: Record, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the other losses of a record besides the language model's, in words."""
    for name, value in record.items():
        inner = name.removeprefix(prefix)
        if name.startswith(prefix) and inner.endswith("_loss"):
            yield inner.replace("_", " "), value


def sets_of(record: Record) -> list[str]:
    """Return the names of the held-out sets of an evaluation."""
    found = (name.partition("/") for name in record)
    return [own for kind, slash, own in found if slash and kind == "val_loss"]


def of_set(record: Record, name: str) -> Record:
    """Return the numbers of one held-out set of an evaluation, as if it were the only one."""
    end = f"/{name}"
    return {key.removesuffix(end): value for key, value in record.items() if key.endswith(end)}


def _lines(path: Path) -> Iterator[bytes]:
    try:
        file = open_file(path, within=path.parent)
    except MissingFileError:
        return
    with file:
        while line := file.readline(_LONGEST_LINE):
            yield line
