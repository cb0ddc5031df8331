"""Limits on the size of gradients: of the whole model, and of groups of parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mt_optim.checks import check_positive
from mt_optim.parameters.matching import ParamFilter

if TYPE_CHECKING:  # settings of a run are checked without torch
    from mt_data_parallel import ParamShard

REST = "rest"  # the parameters that are in no norm group


@dataclass(frozen=True, kw_only=True)
class NormGroup(ParamFilter):
    """Parameters whose gradient is clipped by a norm of its own; chosen as by `GroupOverride`.

    Attributes:
        max_norm: The largest norm of their gradient.

    Raises:
        ValueError: No parameters are chosen, or the norm is not positive.
        TypeError: A field has the wrong type.
    """

    max_norm: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("max_norm", self.max_norm)


@dataclass(frozen=True, kw_only=True)
class GradLimits:
    """Limits on the size of gradients.

    Attributes:
        max_norm: Largest norm of all parameters outside of the norm groups; None never clips.
        norm_groups: Groups of parameters with norms of their own.
        max_value: Largest magnitude of an element, clipped after the norm; None never clips.
        skip_above: Skip a step if the norm of the whole model is larger; None skips a step only if
            the norm is not finite.

    Raises:
        ValueError: A limit is not positive, or two groups have one name.
        TypeError: A field has the wrong type.
    """

    max_norm: float | None = None
    norm_groups: tuple[NormGroup, ...] = ()
    max_value: float | None = None
    skip_above: float | None = None

    def __post_init__(self) -> None:
        for what in ("max_norm", "max_value", "skip_above"):
            limit = getattr(self, what)
            if limit is not None:
                check_positive(what, limit)
        groups: object = self.norm_groups
        if not isinstance(groups, tuple) or not all(isinstance(g, NormGroup) for g in groups):
            raise TypeError(f"norm_groups must be NormGroups, got {self.norm_groups!r:.60}")
        names = [REST, *map(str, self.norm_groups)]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"norm_groups has {twice[0]!r} twice, or that is the rest's name")

    @property
    def max_norms(self) -> dict[str, float | None]:
        """The largest norm of each group by its name, `rest` first."""
        return {REST: self.max_norm, **{str(group): group.max_norm for group in self.norm_groups}}

    def group_of(self, shard: ParamShard) -> str:
        """Return the name of a parameter's norm group, `rest` if it is in none.

        Raises:
            ValueError: Several groups match it.
        """
        found = [str(own) for own in self.norm_groups if own.matches(shard.name, shard.source)]
        if len(found) > 1:
            raise ValueError(
                f"parameter {shard.name!r} is in the norm groups {' and '.join(found)}; let one of "
                "them match it"
            )
        return found[0] if found else REST
