"""The JSON values of a manifest: allowed values, limits, and the records of its files."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from mt_ckpt.array import ArraySpec
from mt_ckpt.digest import is_digest

MAX_BYTES = 128 * 2**20
# A parsed value takes up to a hundred bytes, however short its text is.
_MAX_VALUES = 2**22
_MAX_DEPTH = 256
_SUMS = re.compile(r"([0-9a-f]{8})+")


def check_metadata(metadata: Any) -> None:
    """Raise TypeError or ValueError unless JSON stores `metadata` without loss."""

    def walk(value: Any, where: str, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise ValueError(f"{where:.200}: nested deeper than {_MAX_DEPTH}, or within itself")
        if isinstance(value, dict):
            for key, item in value.items():
                if not isinstance(key, str):
                    raise TypeError(f"{where}: key {key!r} is not a string")
                walk(item, f"{where}[{key!r}]", depth + 1)
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                walk(item, f"{where}[{index}]", depth + 1)
        elif not (value is None or type(value) in (bool, int, float, str)):
            raise TypeError(f"{where}: a {type(value).__name__} is not a JSON value")
        elif type(value) is float and not math.isfinite(value):
            raise ValueError(f"{where}: {value} is not a JSON number; store it as a string")

    if not isinstance(metadata, dict):
        raise TypeError(f"metadata must be a dict, not {type(metadata).__name__}")
    walk(metadata, "metadata", 0)


def too_large(text: bytes) -> str | None:
    """Return the problem if a manifest is larger than a save writes and a reader parses."""
    if len(text) > MAX_BYTES:
        return f"has {len(text)} bytes; at most {MAX_BYTES} are read of a manifest"
    values = sum(map(text.count, (b",", b"[", b"{")))
    if values > _MAX_VALUES:
        return f"has about {values} values; at most {_MAX_VALUES} are read of a manifest"
    return None


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A file of a checkpoint.

    Attributes:
        size: Its size in bytes.
        digest: Digest of its content, which names its algorithm.
        sums: The crc32c of each slice as stored, four bytes each in hex; empty without slices.
    """

    size: int
    digest: str
    sums: str = ""

    def record(self) -> list[Any]:
        """Return the record as JSON."""
        return [self.size, self.digest, *([self.sums] if self.sums else [])]


def array_record(spec: ArraySpec) -> dict[str, Any]:
    """Return the description of an array as JSON."""
    record: dict[str, Any] = {"shape": list(spec.shape), "dtype": spec.dtype}
    if spec.pack is None:
        sliced = {} if spec.slices is None else {"slices": list(spec.slices)}
        return record | {"chunks": list(spec.chunks)} | sliced
    return record | {"pack": spec.pack, "offset": spec.offset}


def array_spec(name: str, record: Any, version: int) -> ArraySpec:
    """Return the description of an array; by hand, as there may be 100,000."""
    match record:
        case {"shape": list(shape), "dtype": str(dtype), "chunks": list(chunks)} if (
            len(record) == 3
        ):
            return ArraySpec(
                shape=tuple(shape), dtype=dtype, chunks=tuple(chunks), wide=version == 1
            )
        case {
            "shape": list(shape),
            "dtype": str(dtype),
            "chunks": list(chunks),
            "slices": list(slices),
        } if len(record) == 4 and version > 2:
            return ArraySpec(
                shape=tuple(shape), dtype=dtype, chunks=tuple(chunks), slices=tuple(slices)
            )
        case {
            "shape": list(shape),
            "dtype": str(dtype),
            "pack": str(pack),
            "offset": offset,
        } if len(record) == 4 and version > 1 and type(offset) is int:
            size = tuple(shape)
            return ArraySpec(shape=size, dtype=dtype, chunks=size, pack=pack, offset=offset)
    raise ValueError(
        f"the record of {name!r:.300} must be shape and dtype, with chunks or with pack and offset"
    )


def typed(body: dict[str, Any], key: str, kind: type) -> Any:
    """Return the value of a key, after a check of its JSON type."""
    value = body.get(key)
    if type(value) is not kind:
        raise ValueError(f"{key!r} must be a JSON {kind.__name__}, not {value!r:.60}")
    return value


def file_record(name: str, value: Any, version: int) -> FileRecord:
    """Return the record of a file, whose path may not lead out of the checkpoint."""
    safe = not name.startswith("/") and not set(name.split("/")) & {"", ".", ".."}
    if not safe or "\\" in name or "\0" in name:
        raise ValueError(f"path {name!r} leads out of the checkpoint")
    match value:
        case [int(size), str(digest)] if size >= 0:
            named = f"sha256:{digest}" if version == 1 else digest
            if is_digest(named):
                return FileRecord(size=size, digest=named)
        case [int(size), str(digest), str(sums)] if size >= 0 and version > 2:
            if is_digest(digest) and _SUMS.fullmatch(sums):
                return FileRecord(size=size, digest=digest, sums=sums)
    raise ValueError(f"the record of {name!r} must be [size, digest] or [size, digest, sums]")
