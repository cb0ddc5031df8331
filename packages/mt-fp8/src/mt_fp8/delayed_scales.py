"""The state of delayed scaling of one layer, as a module has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mt_fp8.delayed import DelayedState
from mt_fp8.recipe import ROLES, Recipe, Role

_BUFFERS = ("history", "factor")


class DelayedScales(nn.Module):
    """The state of delayed scaling of one layer: a `DelayedState` in buffers, changed in place.

    A step's factors stay what they are while it runs, however many micro-batches and recomputations
    it has; what it finds is noted, and `end_step` makes the next step's factors of that. Before
    the first `end_step` nothing is known, and each tensor is scaled by its own magnitude.

    Args:
        recipe: A recipe with delayed scaling.
        device: Device of the state.

    Attributes:
        recipe: The recipe.
        history: As in `DelayedState`.
        factor: As in `DelayedState`.

    Shape:
        history: [recipe.history, 3]. factor: [3]. Both fp32, whatever the module is converted to.
    """

    history: Tensor
    factor: Tensor

    def __init__(self, recipe: Recipe, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.recipe, self._knows = recipe, False
        state = DelayedState.new(recipe, device=device)
        self.register_buffer("history", state.history)
        self.register_buffer("factor", state.factor)
        self.register_load_state_dict_post_hook(lambda module, _: module.resume())

    def of(self, role: Role) -> Tensor | None:
        """Return what a tensor is multiplied by; None where its own magnitude says it.

        Shape:
            Returns [].
        """
        return self.factor[ROLES.index(role)] if self._knows else None

    def note(self, role: Role, amax: Tensor) -> None:
        """Take note of a magnitude of this step; the largest counts.

        Shape:
            amax: [].
        """
        own = self.history[0, ROLES.index(role)]
        torch.maximum(own, amax.to(own), out=own)

    def resume(self) -> None:
        """Go on from what the buffers were filled with; waits for the device."""
        self._knows = bool(_have_factors(self.factor))

    def take(self, state: DelayedState, *, has_run: bool = True) -> None:
        """Begin the next step with a state; until a layer has run, its factors say nothing."""
        self.history.copy_(state.history)
        self.factor.copy_(state.factor)
        self._knows = has_run

    def extra_repr(self) -> str:
        """What torch prints."""
        return f"length={self.recipe.history}, largest={self.recipe.largest!r}"

    def _apply(self, fn: Any, recurse: bool = True) -> DelayedScales:  # noqa: FBT001, FBT002 - torch's own
        """Take over a device, and no dtype."""
        kept = {name: getattr(self, name) for name in _BUFFERS}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = getattr(self, name)
            if after.dtype != before.dtype:
                setattr(self, name, before.to(after.device))
        return self


@torch.no_grad()
def end_step(
    layers: Sequence[DelayedScales], *groups: dist.ProcessGroup | None, may_rest: bool = False
) -> None:
    """End a step of delayed scaling for layers of one recipe.

    One all-reduce (MAX) in each group of the magnitudes that all layers noted; the host waits for
    nothing, but with `may_rest`.

    Args:
        layers: The same ones in the same order on all ranks of a group.
        *groups: Groups whose ranks agree on the factors; `None` is this rank alone.
        may_rest: Whether a layer may not have run yet on any rank, as an expert without tokens:
            such a one goes on as before its first step. The host asks the device, once for all.

    Raises:
        ValueError: The layers have several recipes.
    """
    if not layers:
        return
    recipe = layers[0].recipe
    if any(each.recipe != recipe for each in layers):
        raise ValueError("layers of one recipe end a step together; call this for each recipe")
    state = DelayedState(
        history=torch.stack([each.history for each in layers], 1),
        factor=torch.stack([each.factor for each in layers]),
    )
    for group in groups:
        if group is not None:
            dist.all_reduce(state.history[0], op=dist.ReduceOp.MAX, group=group)
    after = state.updated(recipe)
    knows = _have_factors(after.factor).tolist() if may_rest else [True] * len(layers)
    for each, history, factor, has_run in zip(
        layers, after.history.unbind(1), after.factor.unbind(), knows, strict=True
    ):
        each.take(DelayedState(history=history.contiguous(), factor=factor), has_run=has_run)


def _have_factors(factor: Tensor) -> Tensor:
    """Say which layers' factors were ever made; until then they are 1."""
    return (factor != 1).any(-1)
