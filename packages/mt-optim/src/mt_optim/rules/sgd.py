"""SGD with momentum, through torch's kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.optim.sgd import sgd

from mt_optim.checks import check_bool, check_fraction
from mt_optim.rules.rule import Batch, Rule


class SGDRule(Rule):
    """The SGD of torch.optim: weight decay is added to the gradient.

    Args:
        momentum: Default decay rate of the sum of gradients; 0 keeps none at all, and cannot be
            raised later.
        dampening: Default dampening of the gradient after the first step.
        nesterov: Whether to use Nesterov momentum.
    """

    name: ClassVar[str] = "sgd"

    def __init__(
        self, *, momentum: float = 0.0, dampening: float = 0.0, nesterov: bool = False
    ) -> None:
        self.options = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        self.moments = ("momentum_buffer",) if momentum else ()

    def check(self, group: Mapping[str, Any]) -> None:
        """Check momentum, dampening and nesterov."""
        momentum = group["momentum"]
        check_fraction("momentum", momentum)
        check_fraction("dampening", group["dampening"])
        check_bool("nesterov", group["nesterov"])
        if momentum and not self.moments:
            raise ValueError(
                f"momentum is {momentum}, and the optimizer was made without; make it with momentum"
            )
        if group["nesterov"] and (not momentum or group["dampening"]):
            raise ValueError(
                f"nesterov needs a momentum above 0 and dampening 0, got {momentum} and "
                f"{group['dampening']}"
            )

    def update(self, batch: Batch, group: Mapping[str, Any]) -> None:
        """Run torch's foreach kernels; the first step of a parameter sets its momentum."""
        if not group["momentum"]:
            _sgd(batch, [None] * len(batch.shards), group)
        else:
            first = [i for i, state in enumerate(batch.states) if not state["step"]]
            later = [i for i, state in enumerate(batch.states) if state["step"]]
            if later:
                part = batch.pick(later)
                _sgd(part, part.moment("momentum_buffer"), group)
            if first:
                part = batch.pick(first)
                made: list[Any] = [None] * len(first)  # torch's sgd sets each
                _sgd(part, made, group)
                torch._foreach_copy_(part.moment("momentum_buffer"), made)
        batch.count()


def _sgd(batch: Batch, buffers: Any, group: Mapping[str, Any]) -> None:
    # To look ahead, torch adds the momentum to the gradients in place.
    in_place = group["nesterov"] and not group["weight_decay"]
    sgd(
        batch.masters,
        [grad.clone() for grad in batch.grads] if in_place else batch.grads,
        buffers,
        foreach=True,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=False,
    )
