"""Delayed scaling: factors of this step from the largest values of earlier ones."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist
from mt_files import check_type, shorten
from torch import Tensor

from mt_fp8.recipe import ROLES, Recipe, Role
from mt_fp8.scale import factor_of

_NOT_RUN = -1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class DelayedState:
    """What delayed scaling knows of the input, the weight and the gradient of a linear layer.

    A value: each method returns another one. Many layers make one state with more dims, by
    stacking their tensors, and are updated by one all-reduce.

    Attributes:
        history: Largest magnitudes. Row 0 is this step's, -1 for a tensor that was not seen; the
            rows after it are earlier steps, with the latest at the end.
        factor: What elements are multiplied by in this step.

    Shape:
        history: [length, ..., 3] of fp32: input, weight, grad.
        factor: [..., 3] of fp32.

    Raises:
        TypeError: A tensor is of another type.
        ValueError: Shapes don't fit.

    Example:
        >>> from mt_fp8 import recipe
        >>> how = recipe("delayed")
        >>> state = DelayedState.new(how).recorded("input", torch.tensor(2.0)).updated(how)
        >>> state.factor.tolist()
        [224.0, 1.0, 1.0]
    """

    history: Tensor
    factor: Tensor

    def __post_init__(self) -> None:
        for name in ("history", "factor"):
            tensor = getattr(self, name)
            check_type(name, tensor, Tensor)
            if tensor.dtype != torch.float32:
                raise TypeError(f"{name} must be fp32, got {tensor.dtype}")
        history, factor = tuple(self.history.shape), tuple(self.factor.shape)
        if not history or not history[0] or history[1:] != factor or factor[-1:] != (len(ROLES),):
            raise ValueError(
                f"history must be [length, ..., 3] and factor [..., 3], got {history} and {factor}"
            )

    @classmethod
    def new(cls, recipe: Recipe, *, device: torch.device | str | None = None) -> DelayedState:
        """Return the state before the first step, whose factors are 1.

        Raises:
            ValueError: The recipe is not one of delayed scaling.
        """
        check_type("recipe", recipe, Recipe)
        if not recipe.history:
            raise ValueError(
                f"recipe {recipe.name!r} has no history, so its scales are of the tensor itself; "
                "use recipe('delayed')"
            )
        history = torch.zeros(recipe.history, len(ROLES), device=device)
        history[0] = _NOT_RUN
        return cls(history=history, factor=torch.ones(len(ROLES), device=device))

    def factor_of(self, role: Role) -> Tensor:
        """Return the factor of this step, as `quantize` takes it.

        Shape:
            Returns [...]; [] for one layer.
        """
        return self.factor[..., _place(role)]

    def recorded(self, role: Role, amax: Tensor) -> DelayedState:
        """Return the state with a magnitude of this step, of which the largest counts.

        To record the same again changes nothing, so recomputation may. Evaluation must not record.

        Shape:
            amax: [...], as of `factor_of`.
        """
        place = _place(role)
        check_type("amax", amax, Tensor)
        if amax.shape != self.factor.shape[:-1]:
            raise ValueError(
                f"amax must have the shape {tuple(self.factor.shape[:-1])}, got {tuple(amax.shape)}"
            )
        history = self.history.clone()
        history[0, ..., place] = torch.maximum(history[0, ..., place], amax.to(torch.float32))
        return dataclasses.replace(self, history=history)

    def updated(self, recipe: Recipe, *, group: dist.ProcessGroup | None = None) -> DelayedState:
        """Return the state of the next step.

        A factor stays where the magnitude that counts is 0 or not finite. The history of a tensor
        that no rank has seen stays too.

        Args:
            recipe: As in `new`.
            group: Ranks with other parts of the same tensors, which all call this: magnitudes of
                this step are reduced over it (MAX).

        Raises:
            ValueError: The recipe has another length of history.
        """
        if recipe.history != len(self.history):
            raise ValueError(
                f"recipe {recipe.name!r} has a history of {recipe.history}, and the state one of "
                f"{len(self.history)}; begin with DelayedState.new(recipe)"
            )
        history = self.history.clone()
        if group is not None:
            staged = history[0].contiguous()
            dist.all_reduce(staged, op=dist.ReduceOp.MAX, group=group)
            history[0] = staged
        amax = history[0] if recipe.largest == "most_recent" else history.amax(0)
        has_run = ~(history[0] < 0)
        rolled = history.roll(-1, 0)
        rolled[0] = _NOT_RUN
        return DelayedState(
            history=torch.where(has_run, rolled, history),
            factor=torch.where(
                has_run & amax.isfinite() & (amax > 0), self._wanted(amax, recipe), self.factor
            ),
        )

    def _wanted(self, amax: Tensor, recipe: Recipe) -> Tensor:
        wanted = []
        for place, role in enumerate(ROLES):
            scaling = recipe.scaling(role)
            if scaling is None:
                wanted.append(self.factor[..., place])
                continue
            scaling = dataclasses.replace(scaling, margin=scaling.margin + recipe.margin)
            wanted.append(factor_of(amax[..., place], scaling))
        return torch.stack(wanted, -1)


def _place(role: Role) -> int:
    if role not in ROLES:
        raise ValueError(f"role must be input, weight or grad; got {shorten(role)}")
    return ROLES.index(role)
