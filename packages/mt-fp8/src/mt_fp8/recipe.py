"""Recipes: the quantisation of the three tensors of a linear layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from mt_files import Checks, did_you_mean, shorten

from mt_fp8.scaling import Scaling

Role = Literal["input", "weight", "grad"]
ROLES: tuple[Role, ...] = ("input", "weight", "grad")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the three tensors of a linear layer are quantised.

    Attributes:
        name: In messages and configuration.
        input: Scaling of the layer's input; None leaves it as it is.
        weight: Scaling of its weight.
        grad: Scaling of the gradient of its output.
        hadamard: Whether the two operands of the weight's gradient are rotated.
        history: For delayed scaling, how many steps the largest values are remembered; 0: scales
            come from the tensor itself.
        largest: Which of them counts: the `most_recent` or the `max`.
        margin: Delayed scales leave room for values 2^margin times as large.

    Raises:
        FieldError: A field is out of range, or two don't go together. It is a ValueError.
    """

    name: str
    input: Scaling | None
    weight: Scaling | None
    grad: Scaling | None
    hadamard: bool = False
    history: int = 0
    largest: Literal["most_recent", "max"] = "most_recent"
    margin: int = 0

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(0, "history", "margin")
        checks.at_most(32, "margin")
        if "margin" not in checks.errors and self.margin and not self.history:
            checks.add("margin", "it is that of delayed scaling, and history is 0")
        for role in ROLES:
            scaling = getattr(self, role)
            if role in checks.errors or scaling is None:
                continue
            if self.history and (scaling.block, scaling.scale) not in _DELAYED:
                checks.add(role, "delayed scaling is of block 'tensor' with scale fp32 or pow2")
        checks.done()

    @property
    def block_size(self) -> int:
        """The longest side of its blocks; 1 where there are none."""
        scalings = (getattr(self, role) for role in ROLES)
        blocks = (scaling.block for scaling in scalings if scaling is not None)
        return max((max(block) for block in blocks if isinstance(block, tuple)), default=1)

    def scaling(self, role: Role, *, column: bool = False) -> Scaling | None:
        """Return how a tensor is quantised along its rows, or for `column` along its columns.

        A weight's gradient contracts over tokens: its operands are quantised along columns.

        Raises:
            ValueError: There is no such role.
        """
        if role not in ROLES:
            raise ValueError(f"role must be input, weight or grad; got {shorten(role)}")
        found: Scaling | None = getattr(self, role)
        if found is None or not (column and self.hadamard and role != "weight"):
            return found
        return dataclasses.replace(found, hadamard=True)


_DELAYED = (("tensor", "fp32"), ("tensor", "pow2"))


def _one(name: str, form: Scaling, **changes: Any) -> Recipe:
    return Recipe(**{"name": name, "input": form, "weight": form, "grad": form, **changes})


_ROW = Scaling(block="row", scale="pow2")
_BLOCK = Scaling(block=(1, 128), scale="pow2")
_FP4 = Scaling(format="e2m1", block=(1, 16), scale="nvfp4")
RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        item.name: item
        for item in (
            _one("tensorwise", Scaling(), grad=Scaling(format="e5m2")),
            _one("rowwise", _ROW),
            _one("delayed", Scaling(), grad=Scaling(format="e5m2"), history=1),
            _one("blockwise", _BLOCK, weight=Scaling(block=(128, 128), scale="pow2")),
            _one("mxfp8", Scaling(block=(1, 32), scale="e8m0")),
            _one(
                "nvfp4",
                _FP4,
                weight=Scaling(format="e2m1", block=(16, 16), scale="nvfp4"),
                grad=dataclasses.replace(_FP4, stochastic=True),
                hadamard=True,
            ),
        )
    }
)


def recipe(name: str, **changes: Any) -> Recipe:
    """Return a recipe by its name, with some fields changed.

    Args:
        name: tensorwise, rowwise, delayed, blockwise, mxfp8 or nvfp4.
        changes: Fields of `Recipe` and their values.

    Raises:
        TypeError: There is no such field.
        ValueError: There is no such recipe, or a value is out of range.

    Example:
        >>> recipe("delayed", history=1024, largest="max").history
        1024
    """
    if name not in RECIPES:
        raise ValueError(f"recipe {shorten(name)} is unknown. {did_you_mean(str(name), RECIPES)}")
    known = [field.name for field in dataclasses.fields(Recipe)]
    for key in changes:
        if key not in known:
            raise TypeError(f"a recipe has no field {shorten(key)}. {did_you_mean(key, known)}")
    return dataclasses.replace(RECIPES[name], **changes)
