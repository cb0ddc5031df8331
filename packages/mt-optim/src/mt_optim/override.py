"""Groups of parameters that differ from the rest: by name, by attribute or by a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from mt_data_parallel import Piece, pieces_of
from torch import Tensor, nn

from mt_optim.group import check_size


@dataclass(frozen=True, kw_only=True)
class GroupOverride:
    """What some parameters have in place of the optimizer's own settings.

    A parameter is meant if everything that is given here matches it.

    Attributes:
        names: A glob over the parameter's name, such as `embedding.*` or `*.mixer.qkv.*`; `*`
            stands for dots too.
        attribute: An attribute of the parameter that is true.
        where: A function of name and parameter.
        lr_scale: Times the learning rate, at each step of a schedule.
        wd_scale: Times the weight decay; 0 for none. Parameters that `decay_filter` refuses have
            none anyway.

    Raises:
        ValueError: Nothing says which parameters are meant, or a scale is out of range.
        TypeError: A field is of another type.
    """

    names: str | None = None
    attribute: str | None = None
    where: Callable[[str, Tensor], bool] | None = None
    lr_scale: float | None = None
    wd_scale: float | None = None

    def __post_init__(self) -> None:
        for what in ("names", "attribute"):
            if not isinstance(getattr(self, what), str | None):
                raise TypeError(f"{what} must be a string, got {getattr(self, what)!r:.60}")
        if self.where is not None and not callable(self.where):
            raise TypeError(f"where must be a function, got {self.where!r:.60}")
        if self.names is None and self.attribute is None and self.where is None:
            raise ValueError("an override needs names, attribute or where, to say whose it is")
        for what, value in self.settings.items():
            check_size(what, value)
        if not self.settings:
            raise ValueError("an override needs lr_scale or wd_scale, to say what is other")

    @property
    def settings(self) -> dict[str, float]:
        """What it sets."""
        given = {"lr_scale": self.lr_scale, "wd_scale": self.wd_scale}
        return {key: value for key, value in given.items() if value is not None}

    def matches(self, name: str, param: Tensor) -> bool:
        """Say whether a parameter is meant."""
        return (
            (self.names is None or fnmatchcase(name, self.names))
            and (self.attribute is None or bool(getattr(param, self.attribute, False)))
            and (self.where is None or bool(self.where(name, param)))
        )

    def __str__(self) -> str:
        return self.names or self.attribute or getattr(self.where, "__name__", "where")


def override_groups(
    named_params: Iterable[tuple[str, nn.Parameter] | Piece], overrides: Sequence[GroupOverride]
) -> list[dict[str, Any]]:
    """Return the groups that overrides make, as any optimizer here takes them.

    Args:
        named_params: Names and parameters, or pieces.
        overrides: Several may match a parameter, if they do not set the same to different values.

    Returns:
        Groups with `params`, and `lr_scale` and `wd_scale` where they are set. The parameters keep
        their order inside of a group.

    Raises:
        ValueError: Two overrides contradict each other.
    """
    groups: dict[tuple[tuple[str, float], ...], list[Piece]] = {(): []}
    for piece in pieces_of(named_params):
        settings: dict[str, float] = {}
        setters: dict[str, GroupOverride] = {}
        for override in overrides:
            if not override.matches(piece.name, piece.source):
                continue
            for key, value in override.settings.items():
                if settings.setdefault(key, value) != value:
                    raise ValueError(
                        f"parameter {piece.name!r} has {key} {settings[key]} from override "
                        f"'{setters[key]}' and {value} from '{override}'; let one of them match it"
                    )
                setters[key] = override
        groups.setdefault(tuple(sorted(settings.items())), []).append(piece)
    return [{"params": pieces, **dict(key)} for key, pieces in groups.items() if pieces]


def mup_overrides(
    width_multiplier: float, is_hidden: Callable[[str, Tensor], bool]
) -> list[GroupOverride]:
    """Return the overrides of muP for Adam: hidden matrices have the rate over the width.

    Args:
        width_multiplier: The model's width over that of the one whose rate was tuned.
        is_hidden: Which parameters grow in both dims with the width, such as `is_hidden_matrix`.

    Raises:
        ValueError: The multiplier is not positive.
    """
    if not 0 < width_multiplier < math.inf:
        raise ValueError(f"width_multiplier must be positive, got {width_multiplier}")
    return [GroupOverride(where=is_hidden, lr_scale=1 / width_multiplier)]
