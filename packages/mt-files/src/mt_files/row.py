"""Declarations of the arrays in a row: what a data set makes, and what a model reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mt_files.field import Checks

Stage: TypeAlias = Literal["first", "middle", "last"]
STAGES: tuple[Stage, ...] = ("first", "middle", "last")


@dataclass(frozen=True, kw_only=True)
class RowField:
    """One array of every row of a data set. A batch has the arrays of its rows, stacked.

    Attributes:
        name: Name of the array.
        dtype: Dtype of the array, by numpy's name.
        dims: Names of the array's dims; a data set says the size of each. `()` is one number.
        fill: Value of absent elements, and of all elements of an empty row. A label with this value
            does not count.
        cut: Part of the array on a rank of a context-parallel group: its part `along` the first
            dim, the `whole` array, or the whole array on the group's first rank `once` and `fill`
            on the others.
        stages: Stages of a pipeline that read the values; ranks without such a stage have `fill`.
        is_tokens: Whether the values are token ids, or `fill`, to check against the vocabulary.
        counts: Name of the count to which each label of this array adds one; None if the array has
            no labels. All stages count them.
        positions: Name of the field with the position of each label in its document; None if
            positions are counted in the row.
        joined: Whether rows have any number of items of the first dim, such as images. A batch has
            them one after the other, in the order of its rows; an empty row has none.
    """

    name: str
    dtype: Literal["int64", "int32", "bool", "float64", "float32"] = "int64"
    dims: tuple[str, ...] = ("tokens",)
    fill: float = 0
    cut: Literal["along", "whole", "once"] = "along"
    stages: tuple[Stage, ...] = STAGES
    is_tokens: bool = False
    counts: str | None = None
    positions: str | None = None
    joined: bool = False

    def __post_init__(self) -> None:
        checks = Checks(self)
        if not checks.errors and self.cut == "along" and not self.dims:
            checks.add("cut", "'along', but the array has no dim; use 'whole' or 'once'")
        if not checks.errors and self.joined and (self.cut == "along" or not self.dims):
            text = "True, but ranks that share rows can't cut them; use a dim, and 'whole' or "
            checks.add("joined", text + "'once'")
        if not checks.errors and self.counts is not None and self.stages != STAGES:
            text = f"{self.stages}, but every stage counts labels; leave it out"
            checks.add("stages", text)
        checks.done()

    def is_read(self, stages: Iterable[Stage]) -> bool:
        """Return whether a rank with these stages of a pipeline reads the values."""
        return not set(self.stages).isdisjoint(stages)

    def conflict(self, reader: RowField) -> str | None:
        """Return why a model that reads `reader` can't take this field; None if it can.

        Integers of any size do for integers.
        """
        kinds = [each.dtype.rstrip("0123456789") for each in (self, reader)]
        if kinds[0] != kinds[1]:
            return f"dtype {self.dtype}, and the model reads {reader.dtype}"
        if len(self.dims) != len(reader.dims):
            return f"{len(self.dims)} dims, and the model reads {len(reader.dims)}"
        if (self.cut == "along") != (reader.cut == "along"):
            return f"cut {self.cut!r}, and the model reads it {reader.cut!r}"
        return None
