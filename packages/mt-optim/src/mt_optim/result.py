"""What a step did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What `step` did, the same on every rank.

    Attributes:
        stepped: Whether the parameters were updated. A step is skipped where a gradient is not
            finite or the norm is above the threshold; then nothing has changed.
        grad_norm: Norm of the whole model's gradient before clipping; None if nobody measured it.
        zeros: Number of gradient elements that are zero; None if nobody counted them.
        loss_scale: What the loss was multiplied with for this step.
        loss: What the closure returned, if there was one.
    """

    stepped: bool = True
    grad_norm: float | None = None
    zeros: int | None = None
    loss_scale: float = 1.0
    loss: Any = None
