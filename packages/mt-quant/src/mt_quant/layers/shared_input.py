"""Linear layers that multiply the same input, and the module before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedInput:
    """Linear layers that multiply the same input, and the module that produces it.

    Nothing else may read the input, and the input must be proportional to the weight of its source.
    A source is a norm whose last step multiplies by its weight (and adds its bias), or a linear
    layer whose output reaches the input through linear steps only, such as the averaged values of
    attention, or the half of a gated feed-forward without activation.

    Attributes:
        layers: All linear layers that multiply the input.
        source: The module that produces the input: a norm with a weight, or a linear layer.
        rows: For each feature, the index of the linear source's output that produces it, in the
            whole weight; features may share an output. None for the same order.
        offset: Constant that a norm adds to its weight: 1 for a zero-centred weight.

    Shape:
        rows: int64 [in].
    """

    layers: Sequence[nn.Module]
    source: nn.Module
    rows: Tensor | None = None
    offset: float = 0.0
