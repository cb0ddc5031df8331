"""An activation without a gate, and the bias in front of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mt_fusions
from mt_kernels import Choice, Selector
from mt_tensor_parallel import ColumnParallelLinear, adapter_of
from torch import Tensor, nn

_ADDS_BIAS = ("gelu", "gelu_tanh")


class PlainActivation:
    """The activation after a projection, which may add that one's bias itself.

    Args:
        kind: A name of `mt_fusions.activate`.
        kernel: A candidate of `mt_fusions.BIAS_GELU` or `SQUARED_RELU`, by name.
    """

    def __init__(self, kind: str, kernel: str) -> None:
        self.kind, self._is_invariant = kind, kernel == "invariant"
        self._bias_gelu = Selector(mt_fusions.BIAS_GELU, kernel) if kind in _ADDS_BIAS else None
        self._square = Selector(mt_fusions.SQUARED_RELU, kernel) if kind == "relu2" else None

    def project(self, linear: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Apply a projection, and return its bias where the activation adds that itself.

        Raises:
            KernelError: The named kernel does not serve; the message says why.
        """
        if self._bias_gelu is not None and self._bias_gelu.find(x).name == "fused":
            bias = _bias_of(linear)
            if isinstance(bias, Tensor):
                return linear(x, with_bias=False), bias
        return linear(x), None

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the activation of what `project` returned.

        Shape:
            x: [..., F]; bias: [F]. Returns the shape of x.
        """
        if bias is not None and self._bias_gelu is not None:
            return self._bias_gelu.find(x).function(x, bias, self.kind)
        if self._square is not None:
            return self._square.find(x).function(x)
        function = mt_fusions.activate
        return (mt_fusions.invariant_activation if self._is_invariant else function)(x, self.kind)

    def choices(self, linear: nn.Module, like: Tensor) -> Iterator[Choice[Any]]:
        """Yield what computes it for tensors of the device and dtype of `like`."""
        if self._square is not None:
            yield self._square.choose(like)
        if self._bias_gelu is not None:
            chosen, bias = self._bias_gelu.choose(like), _bias_of(linear)
            if chosen.kernel == "fused" and isinstance(bias, str):
                chosen = Choice("bias_gelu", mt_fusions.BIAS_GELU.get("torch"), bias)
            yield chosen


def _bias_of(linear: nn.Module) -> Tensor | str:
    """Return the bias that a kernel may add, or why there is none."""
    if not isinstance(linear, ColumnParallelLinear) or adapter_of(linear) is not None:
        return "an adapter is added to the projection first"
    return "the projection has no bias" if linear.bias is None else linear.bias
