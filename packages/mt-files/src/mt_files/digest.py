"""SHA-256 of files, remembered while the files do not change."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any, BinaryIO, cast

from mt_files.error import FileError
from mt_files.reading import open_file, read_json
from mt_files.writing import write_file

_MAX_BYTES = 16 * 2**20
_SETTLED_NS = 2 * 10**9


def sha256_file(
    path: str | Path, *, cache: str | Path | None = None, within: str | Path | None = None
) -> str:
    """Return the SHA-256 of a regular file, in hexadecimal.

    Args:
        path: The file; see `open_file`.
        cache: A JSON file that remembers digests by file name. A remembered digest is trusted
            while the file's size, inode, and times of change are the same. This detects every
            change made through the file system, but no decay of the disk. A file changed in the
            last two seconds is not remembered. A cache that can't be read or written is ignored.
        within: See `open_file`.

    Raises:
        FileError: The file can't be read.
    """
    with open_file(path, within=within) as file:
        before = _identity(os.fstat(file.fileno()))
        if (remembered := known_sha256(file, path, cache=cache)) is not None:
            return remembered
        digest = hashlib.file_digest(cast("Any", file), "sha256").hexdigest()
        after = _identity(os.fstat(file.fileno()))
    settled = time.time_ns() - max(after["mtime_ns"], after["ctime_ns"]) > _SETTLED_NS
    if cache is not None and before == after and settled:
        known = {**_read(cache), os.path.basename(path): {**after, "sha256": digest}}
        with contextlib.suppress(FileError):
            write_file(cache, json.dumps(known, indent=1))
    return digest


def known_sha256(file: BinaryIO, path: str | Path, *, cache: str | Path | None) -> str | None:
    """Return the digest of an open file that `sha256_file` has remembered; None if it has not.

    Args:
        file: The file.
        path: Its path.
        cache: The JSON file that remembers.
    """
    entry = None if cache is None else _read(cache).get(os.path.basename(path))
    if entry is None or entry != {**_identity(os.fstat(file.fileno())), "sha256": entry["sha256"]}:
        return None
    return entry["sha256"]


def _identity(status: os.stat_result) -> dict[str, int]:
    return {
        "size": status.st_size,
        "inode": status.st_ino,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
    }


def _read(cache: str | Path) -> dict[str, Any]:
    try:
        known = read_json(cache, limit=_MAX_BYTES)
    except FileError:
        return {}
    entries = known.items() if isinstance(known, dict) else ()
    return {n: e for n, e in entries if isinstance(e, dict) and isinstance(e.get("sha256"), str)}
