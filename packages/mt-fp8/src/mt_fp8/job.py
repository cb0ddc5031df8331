"""Parameters of a kernel's quantisation of one tensor."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mt_fp8.scaling import Scaling


@dataclass(frozen=True, eq=False)
class Job:
    """How a kernel quantises one tensor.

    Attributes:
        scaling: How it is quantised.
        factor: Factor of the elements, in the shape of the scales; for nvfp4 the factor of the
            tensor; None where blocks have the factors that their elements ask for.
        seed: Seed of stochastic rounding.
    """

    scaling: Scaling
    factor: Tensor | None
    seed: int | Tensor | None
