"""A choice of parameters by a glob over names, an attribute or a predicate, and their settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from mt_files import check_type

from mt_optim.checks import check_betas, check_function, check_size

if TYPE_CHECKING:  # settings of a run are checked without torch
    from torch import Tensor

# `step(lr=, weight_decay=)` multiplies by the first two; eps was multiplied by the last one.
SCALES = ("lr_scale", "wd_scale", "eps_scale")


@dataclass(frozen=True, kw_only=True)
class ParamFilter:
    """A choice of parameters; each has to match all given fields.

    Attributes:
        names: A glob over the parameter's name, such as `*.experts.*`; `*` matches dots too.
        attribute: Name of an attribute of the parameter whose value is true.
        where: A predicate of name and parameter.

    Raises:
        ValueError: No field is given.
        TypeError: A field has the wrong type.
    """

    names: str | None = None
    attribute: str | None = None
    where: Callable[..., bool] | None = None

    def __post_init__(self) -> None:
        for what in ("names", "attribute"):
            check_type(what, getattr(self, what), str, type(None))
        check_function("where", self.where, optional=True)
        if self.names is None and self.attribute is None and self.where is None:
            raise ValueError(
                f"a {type(self).__name__} needs names, attribute or where, to say which parameters "
                "it is for"
            )

    def matches(self, name: str, param: Tensor) -> bool:
        """Return whether a parameter is chosen."""
        return (
            (self.names is None or fnmatchcase(name, self.names))
            and (self.attribute is None or bool(getattr(param, self.attribute, False)))
            and (self.where is None or bool(self.where(name, param)))
        )

    def __str__(self) -> str:
        return self.names or self.attribute or getattr(self.where, "__name__", "where")


@dataclass(frozen=True, kw_only=True)
class GroupOverride(ParamFilter):
    """Settings of some parameters in place of the optimizer's own.

    Attributes:
        lr_scale: Factor of the learning rate, in each step of a schedule.
        wd_scale: Factor of the weight decay; 0 for none. Parameters that `decay_filter` refuses
            have none anyway.
        eps_scale: Factor of the eps that the rule adds to the root of its second moment.
        betas: The rule's decay rates.

    Raises:
        ValueError: No parameters are chosen, or a setting is missing or out of range.
        TypeError: A field has the wrong type.
    """

    lr_scale: float | None = None
    wd_scale: float | None = None
    eps_scale: float | None = None
    betas: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for what in SCALES:
            check_size(what, self.settings.get(what, 1.0))
        if self.betas is not None:
            check_betas(self.betas)
        if not self.settings:
            known = ", ".join(SCALES)
            raise ValueError(f"an override needs {known} or betas, to say what is other")

    @property
    def settings(self) -> dict[str, Any]:
        """What it sets."""
        given = {key: getattr(self, key) for key in SCALES}
        given["betas"] = None if self.betas is None else tuple(self.betas)
        return {key: value for key, value in given.items() if value is not None}
