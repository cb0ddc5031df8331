"""Digests of a dataset's identity, and random bits that depend only on a key."""

from __future__ import annotations

import hashlib
import json

import numpy as np
from numpy.typing import NDArray


def digest_of(identity: object) -> str:
    """Return the sha256 of JSON values."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def random_bits(count: int, *key: int | str) -> NDArray[np.uint64]:
    """Return random 64-bit numbers that depend only on the key (Philox)."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(digest, "big")).random_raw(count)
