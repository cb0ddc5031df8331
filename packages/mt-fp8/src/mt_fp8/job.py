"""What is asked of a kernel that quantises: one orientation of a tensor."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mt_fp8.scaling import Scaling


@dataclass(frozen=True, eq=False)
class Job:
    """One orientation of a tensor.

    Attributes:
        scaling: How it is quantised.
        factor: What elements are multiplied by, of the shape of scales; for nvfp4 that of the
            tensor; None where blocks have the factors that their elements ask for.
        seed: Of stochastic rounding.
    """

    scaling: Scaling
    factor: Tensor | None
    seed: int | Tensor | None
