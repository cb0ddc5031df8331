"""The memory and the stream that several CUDA graphs share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mt_files import check_type


class GraphPool:
    """A memory pool and a side stream that several graphs share.

    The graphs of a pool may be replayed in any order, one at a time. Outputs and tensors saved for
    backward are private to each graph; temporary memory is shared.

    Args:
        slots: Maximum number of passes of an `AutogradGraph` that wait for their backward, at least
            1. Each has its own memory; further passes run the callable directly.
    """

    def __init__(self, *, slots: int = 16) -> None:
        check_type("slots", slots, int)
        if slots < 1:
            raise ValueError(f"slots={slots}: use 1 or more")
        self.slots = slots
        self._handle: Any = None
        self._stream: Any = None

    @contextmanager
    def aside(self, device: torch.device) -> Iterator[None]:
        """Run the block on the side stream (on a CPU, without one)."""
        if device.type != "cuda":
            yield
            return
        current, side = torch.cuda.current_stream(device), self._side(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            yield
        current.wait_stream(side)

    @contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph, device: torch.device) -> Iterator[None]:
        """Capture the block; other threads may allocate meanwhile."""
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        how: Any = {"pool": self._handle, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(graph, stream=self._side(device), **how):
            yield

    def _side(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream
