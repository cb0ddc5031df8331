"""Delayed scaling: factors of this step from the largest values of earlier ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from mt_files import check_type
from torch import Tensor, nn

from mt_fp8.recipe import ROLES, Recipe, Role
from mt_fp8.scale import factor_of

_BUFFERS = ("history", "factor")
_NOT_RUN = -1.0


class DelayedScales(nn.Module):
    """The state of delayed scaling of one layer, in buffers with in-place updates.

    The factors stay the same during a step with any number of micro-batches and recomputations. The
    magnitudes in the step are noted, and `end_step` makes the next step's factors from them. Before
    the first `end_step` nothing is known, and each tensor is scaled by its own magnitude.

    Args:
        recipe: A recipe with delayed scaling.
        device: Device of the state.

    Attributes:
        recipe: The recipe.
        history: Largest magnitudes. Row 0 is this step's, -1 for a tensor that was not seen; the
            rows after it are earlier steps, with the latest at the end.
        factor: Factor of the elements in this step.

    Shape:
        history: [recipe.history, 3]. factor: [3]. Both fp32, whatever the module is converted to;
            the last dim is input, weight and grad.

    Raises:
        ValueError: The recipe is not one of delayed scaling.

    Example:
        >>> from mt_fp8 import recipe
        >>> scales = DelayedScales(recipe("delayed"))
        >>> scales.note("input", torch.tensor(2.0))
        >>> end_step([scales])
        >>> scales.factor.tolist()
        [224.0, 1.0, 1.0]
    """

    history: Tensor
    factor: Tensor

    def __init__(self, recipe: Recipe, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        check_type("recipe", recipe, Recipe)
        if not recipe.history:
            raise ValueError(
                f"recipe {recipe.name!r} has no history, so its scales are of the tensor itself; "
                "use recipe('delayed')"
            )
        self.recipe, self._knows = recipe, False
        history = torch.zeros(recipe.history, len(ROLES), device=device)
        history[0] = _NOT_RUN
        self.register_buffer("history", history)
        self.register_buffer("factor", torch.ones(len(ROLES), device=device))
        self.register_load_state_dict_post_hook(lambda module, _: module.resume())

    def of(self, role: Role) -> Tensor | None:
        """Return what a tensor is multiplied by; None where its own magnitude says it.

        Shape:
            Returns [].
        """
        return self.factor[ROLES.index(role)] if self._knows else None

    def note(self, role: Role, amax: Tensor) -> None:
        """Take note of a magnitude of this step; the largest counts.

        To note the same again changes nothing, so recomputation may. Evaluation must not.

        Shape:
            amax: [].
        """
        own = self.history[0, ROLES.index(role)]
        torch.maximum(own, amax.to(own), out=own)

    def resume(self) -> None:
        """Go on from what the buffers were filled with; waits for the device."""
        self._knows = bool(_have_factors(self.factor))

    def take(self, history: Tensor, factor: Tensor, *, has_run: bool) -> None:
        """Begin the next step; until a layer has run, its factors say nothing."""
        self.history.copy_(history)
        self.factor.copy_(factor)
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
    nothing, but with `may_rest`. A factor stays where the magnitude that counts is 0 or not finite.
    The history of a tensor that no rank has seen stays too.

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
    history = torch.stack([each.history for each in layers], 1)
    factor = torch.stack([each.factor for each in layers])
    for group in groups:
        if group is not None:
            dist.all_reduce(history[0], op=dist.ReduceOp.MAX, group=group)
    amax = history[0] if recipe.largest == "most_recent" else history.amax(0)
    has_run = ~(history[0] < 0)
    is_usable = has_run & amax.isfinite() & (amax > 0)
    factor = torch.where(is_usable, _wanted(amax, factor, recipe), factor)
    rolled = history.roll(-1, 0)
    rolled[0] = _NOT_RUN
    history = torch.where(has_run, rolled, history)
    knows = _have_factors(factor).tolist() if may_rest else [True] * len(layers)
    for each, *state, known in zip(layers, history.unbind(1), factor.unbind(), knows, strict=True):
        each.take(*state, has_run=known)


def _wanted(amax: Tensor, factor: Tensor, recipe: Recipe) -> Tensor:
    """Return the factors that magnitudes ask for.

    Shape:
        amax, factor: [layers, 3]. Returns the same.
    """
    wanted = []
    for place, role in enumerate(ROLES):
        scaling = recipe.scaling(role)
        if scaling is None:
            wanted.append(factor[:, place])
            continue
        scaling = dataclasses.replace(scaling, margin=scaling.margin + recipe.margin)
        wanted.append(factor_of(amax[:, place], scaling))
    return torch.stack(wanted, -1)


def _have_factors(factor: Tensor) -> Tensor:
    """Say which layers' factors were ever made; until then they are 1."""
    return (factor != 1).any(-1)
