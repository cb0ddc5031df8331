"""Gradients that captured backwards add to a buffer themselves, and the buffer's count of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from mt_parallel_state import GradSink
from torch import Tensor, nn


class GraphSinks:
    """Sinks of a `GradBuffer` for layers whose backward is replayed.

    A replay always adds to the gradient's memory, and runs no Python. So the host begins the real
    sinks before each replay, and zeroes the memory where the sink would have overwritten it. After
    the replay it ends the sinks, which reduces complete buckets. Eager backwards use real sinks.

    Args:
        sink_of: Method `sink` of a buffer.
    """

    def __init__(self, sink_of: Callable[[Tensor], GradSink]) -> None:
        self._sink_of = sink_of
        self._sinks: dict[nn.Parameter, _Sink] = {}

    def sink(self, param: nn.Parameter) -> GradSink:
        """Return the sink of a parameter, for `sum_weight_gradients`."""
        return self._sinks.setdefault(param, _Sink(self._sink_of(param)))

    def around(self, params: Iterable[nn.Parameter]) -> Callable[[bool], object]:
        """Return a hook to call with True before a replayed backward, and with False after it.

        Args:
            params: Parameters that get a gradient in the backward.
        """
        own = [self._sinks[param] for param in params if param in self._sinks]

        def call(starts: bool) -> None:  # noqa: FBT001 - as AutogradGraph calls it
            for sink in own:
                if sink.is_used:
                    sink.open() if starts else sink.close()

        return call


class _Sink:
    """One parameter's: the buffer's, or where a replay adds."""

    def __init__(self, sink: GradSink) -> None:
        self._sink, self._out = sink, None
        self._is_open = self.is_used = False

    def begin(self) -> tuple[Tensor, bool]:
        """Return where the gradient goes, and whether to add it there."""
        if self._out is not None and (self._is_open or _is_capturing(self._out)):
            return self._out, True
        self.is_used = True
        self._out, adds = self._sink.begin()
        return self._out, adds

    def end(self) -> None:
        """Say that the gradient is there."""
        if self._out is None or not (self._is_open or _is_capturing(self._out)):
            self._sink.end()

    def open(self) -> None:
        """Begin a gradient that a replay brings."""
        out, adds = self._sink.begin()
        if not adds:
            out.zero_()
        self._out, self._is_open = out, True

    def close(self) -> None:
        """End it."""
        self._is_open = False
        self._sink.end()


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
