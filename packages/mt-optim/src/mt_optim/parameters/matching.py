"""A choice of parameters: by a glob over names, an attribute or a predicate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mt_files import check_type
from torch import Tensor

from mt_optim.checks import check_function


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
    where: Callable[[str, Tensor], bool] | None = None

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
        """Say whether a parameter is chosen."""
        return (
            (self.names is None or fnmatchcase(name, self.names))
            and (self.attribute is None or bool(getattr(param, self.attribute, False)))
            and (self.where is None or bool(self.where(name, param)))
        )

    def __str__(self) -> str:
        return self.names or self.attribute or getattr(self.where, "__name__", "where")
