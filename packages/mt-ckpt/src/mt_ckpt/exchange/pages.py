"""Tensors in temporary files, whose memory the system can take back."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor


class Pages:
    """Tensors in files of a folder.

    Args:
        folder: An existing folder, which the caller removes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    @classmethod
    @contextlib.contextmanager
    def within(cls, folder: Path) -> Iterator[Pages]:
        """Yield pages in a temporary folder below another."""
        with tempfile.TemporaryDirectory(dir=folder, prefix=".pages-") as path:
            yield cls(Path(path))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor to be filled."""
        size = math.prod(shape)
        if not size:
            return torch.empty(shape, dtype=dtype)
        self._count += 1
        path = str(self._folder / str(self._count))
        return torch.from_file(path, shared=True, size=size, dtype=dtype).view(shape)
