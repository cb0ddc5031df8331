"""What the inputs of a linear layer are like, in sums over tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Statistics:
    """Of the inputs that a linear layer saw in calibration. Only what was asked for is there.

    Attributes:
        tokens: How many inputs.
        abs_max: Largest magnitude of each feature.
        second_moment: Mean square of each feature.
        hessian: Mean of the products of each two features.

    Shape:
        abs_max, second_moment: [in]. hessian: [in, in]. All fp32.
    """

    tokens: int
    abs_max: Tensor | None = None
    second_moment: Tensor | None = None
    hessian: Tensor | None = None
