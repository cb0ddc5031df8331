"""What a step did."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mt_optim.gradients.bad import BadGradient
from mt_optim.gradients.statistics import GradStatistics

_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What `step` did, the same on every rank.

    Attributes:
        stepped: Whether the parameters were updated. A step is skipped where a gradient is not
            finite or the norm is above the threshold; then nothing has changed.
        step: The step that was not taken, counted from 1; None where it was.
        grad_norm: Norm of the whole model's gradient before clipping; None if nobody measured it.
        norms: Norm of each group that is clipped alone, by its name.
        zeros: Number of gradient elements that are zero; None if nobody counted them.
        loss_scale: What the loss was multiplied with for this step.
        bad: Of a step that was not taken, the first gradients that are not finite, or the largest.
        num_bad: How many there are of these.
        statistics: Of the gradient before clipping, by group of parameters; empty if not asked for.
        loss: What the closure returned, if there was one.
    """

    stepped: bool = True
    step: int | None = None
    grad_norm: float | None = None
    norms: Mapping[str, float] = field(default_factory=dict)
    zeros: int | None = None
    loss_scale: float = 1.0
    bad: tuple[BadGradient, ...] = ()
    num_bad: int = 0
    statistics: Mapping[str, GradStatistics] = field(default_factory=dict)
    loss: Any = None

    @property
    def is_finite(self) -> bool:
        """Whether the gradients were finite, as far as somebody measured them."""
        return self.grad_norm is None or math.isfinite(self.grad_norm)

    def why_skipped(self) -> str:
        """Say in one line why the step was not taken: step, norm, ranks and parameters."""
        if self.stepped:
            return ""
        where = "" if self.step is None else f"step {self.step}: "
        scale = "" if self.loss_scale == 1 else f", loss scale {self.loss_scale:g}"
        text = f"{where}gradient norm {self.grad_norm}{scale}"
        named = "; ".join(map(str, self.bad[:_SHOWN]))
        more = self.num_bad - min(len(self.bad), _SHOWN)
        return text + (f": {named}" if named else "") + (f" and {more} more" if more > 0 else "")
