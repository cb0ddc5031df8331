"""The result of an optimizer step."""

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
    """The result of `step`, the same on every rank.

    Attributes:
        stepped: Whether the parameters were updated. A step is skipped if a gradient is not finite
            or the norm is above the threshold; then nothing has changed.
        step: Number of the skipped step, counted from 1; None if the step was taken.
        grad_norm: Norm of the whole model's gradient before clipping; None if it was not measured.
        norms: Norm of each norm group, by name.
        zeros: Number of zeros in the gradient; None if they were not counted.
        loss_scale: The scale of this step's loss.
        bad: The first gradients that are not finite, or the largest, if the step was skipped.
        num_bad: The total number of such gradients.
        statistics: Statistics of the gradient before clipping, by group of parameters; empty if not
            requested.
        loss: The result of the closure, if there was one.
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
        """Whether the gradients were finite, as far as they were measured."""
        return self.grad_norm is None or math.isfinite(self.grad_norm)

    def why_skipped(self) -> str:
        """Say in one line why the step was skipped: step, norm, ranks and parameters."""
        if self.stepped:
            return ""
        where = "" if self.step is None else f"step {self.step}: "
        scale = "" if self.loss_scale == 1 else f", loss scale {self.loss_scale:g}"
        text = f"{where}gradient norm {self.grad_norm}{scale}"
        named = "; ".join(map(str, self.bad[:_SHOWN]))
        more = self.num_bad - min(len(self.bad), _SHOWN)
        return text + (f": {named}" if named else "") + (f" and {more} more" if more > 0 else "")
