"""Digests of stored objects, each named with its algorithm, and the crc32c of Zarr."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

import numpy as np

CRC_BYTES = 4
_ALGORITHM = "xxh3-128"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|xxh3-128:[0-9a-f]{32}")


def _xxh3_128() -> Any:
    import xxhash

    return xxhash.xxh3_128()


_MAKERS: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {"sha256": hashlib.sha256, "xxh3-128": _xxh3_128}
)


def is_digest(text: str) -> bool:
    """Return whether a text is the name of a known algorithm, a colon, and a digest by it."""
    return _DIGEST.fullmatch(text) is not None


def digest_of(content: bytes | memoryview, algorithm: str = _ALGORITHM) -> str:
    """Return the digest of a content, with the name of its algorithm: `xxh3-128:00ff...`."""
    hashed = _MAKERS[algorithm]()
    hashed.update(content)
    return f"{algorithm}:{hashed.hexdigest()}"


def crc32c(data: np.ndarray) -> np.ndarray:
    """Return the crc32c of bytes as Zarr stores it.

    Shape:
        data: (any number of bytes,) uint8, contiguous.
        result: (4,) uint8, little-endian.
    """
    import google_crc32c

    value = google_crc32c.value(cast("bytes", data))
    return np.frombuffer(value.to_bytes(CRC_BYTES, "little"), np.uint8)


class Sums:
    """The crc32c and the digest of a chunk, over the blocks added so far."""

    def __init__(self, algorithm: str = _ALGORITHM) -> None:
        import google_crc32c

        self._extend, self._crc = google_crc32c.extend, 0
        self._algorithm, self._hash = algorithm, _MAKERS[algorithm]()

    def add(self, values: np.ndarray) -> None:
        """Add a block of values to both.

        Shape:
            values: (any number of bytes,) uint8, contiguous.
        """
        self._crc = self._extend(self._crc, cast("bytes", values))
        self._hash.update(values)

    def add_stored(self, stored: np.ndarray) -> None:
        """Add bytes to the digest alone, such as the crc32c that follows the values."""
        self._hash.update(stored)

    @property
    def crc(self) -> np.ndarray:
        """The crc32c of the values so far, as Zarr stores it.

        Shape:
            result: (4,) uint8, little-endian.
        """
        return np.frombuffer(self._crc.to_bytes(CRC_BYTES, "little"), np.uint8)

    @property
    def digest(self) -> str:
        """The digest, with the name of its algorithm."""
        return f"{self._algorithm}:{self._hash.hexdigest()}"
