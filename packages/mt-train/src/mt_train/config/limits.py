"""Limits, dtypes and path fields that several sections share.

Sizes have limits, so that a typing error does not allocate a huge model.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal, TypeAlias

PATH, MODEL, STORED = "path", "model", "stored"  # keys of a field's metadata
Dtype: TypeAlias = Literal["fp64", "fp32", "bf16", "fp16"]

# Larger than any real training, and small enough that their products stay plain 64-bit numbers.
MAX_STEPS, MAX_RANKS, MAX_LENGTH = 10**9, 1 << 20, 1 << 27


def path_field(*endings: str, is_model: bool = False, stored: bool = False) -> Any:
    """Declare an optional path field, whose value is relative to the YAML file.

    Args:
        endings: Suffixes of the files that must exist; "" is the path itself.
        is_model: Whether the value may be the id of a model of the Hugging Face hub.
        stored: Whether the value may be a URL of an object store.
    """
    return field(default=None, metadata={PATH: endings, MODEL: is_model, STORED: stored})


def paths_field(*endings: str) -> Any:
    """Declare a field with any number of paths; see `path_field`."""
    return field(default=(), metadata={PATH: endings, MODEL: False})


def listed(numbers: list[int]) -> str:
    """Write numbers for a message, the twelve smallest if there are more."""
    return ", ".join(map(str, numbers[:12])) + (" ..." if len(numbers) > 12 else "")
