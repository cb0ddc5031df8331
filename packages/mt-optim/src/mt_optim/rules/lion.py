"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from mt_optim.checks import check_betas
from mt_optim.rules.rule import Batch, Rule


class LionRule(Rule):
    """Chen et al., arXiv 2302.06675.

    With `m` the moment: the update is `sign(b1 m + (1 - b1) g)`, then `m = b2 m + (1 - b2) g`.

    Args:
        betas: Default rates of the interpolation and of the moment.
    """

    name: ClassVar[str] = "lion"
    moments = ("exp_avg",)

    def __init__(self, *, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        self.options = {"betas": betas}

    def check(self, group: Mapping[str, Any]) -> None:
        """Check betas."""
        check_betas(group["betas"])

    def update(self, batch: Batch, group: Mapping[str, Any]) -> None:
        """Update with foreach kernels."""
        moments, (first, second) = batch.moment("exp_avg"), group["betas"]
        updates = torch._foreach_lerp(moments, batch.grads, 1 - first)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(batch.masters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(batch.masters, updates, alpha=-group["lr"])
        torch._foreach_lerp_(moments, batch.grads, 1 - second)
        batch.count()
