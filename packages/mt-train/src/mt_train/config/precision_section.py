"""The section `precision` of a run's configuration: linear layers in 8 or 4 bits."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from mt_files import Checks

RecipeName: TypeAlias = Literal["tensorwise", "rowwise", "delayed", "blockwise", "mxfp8", "nvfp4"]
_WITHOUT_PRIMARY = ("rowwise", "mxfp8", "nvfp4")
_OF_DELAYED = ("history", "largest", "margin")
_MAX_HISTORY = 1 << 16
_MAX_MARGIN = 32


@dataclass(frozen=True, kw_only=True)
class PrecisionSection:
    """Low precision for the linear layers of blocks; everything else uses `training.dtype`.

    Attributes:
        recipe: Quantisation of a layer's input, weight and gradient: one scale for each tensor from
            its own largest magnitude (`tensorwise`) or from earlier steps (`delayed`), or a scale
            for each row (`rowwise`), 128 numbers or square of 128 (`blockwise`), 32 numbers
            (`mxfp8`) or 16 numbers in 4 bits (`nvfp4`). By default nothing is quantised.
        keep: Globs of linear layers that stay in `training.dtype`, such as `layers.*.mixer.out`;
            globs of experts may name a number: `layers.*.experts.down.3`.
        keep_first: Number of layers at the start of the model that stay in `training.dtype`.
        keep_last: Number of layers at the end of the model that stay in `training.dtype`.
            Embedding, head, norms, attention and routers always do.
        history: Number of steps that `delayed` remembers; 1 by default.
        largest: Magnitude that `delayed` scales by: the `most_recent` (the default) or the `max` of
            its history.
        margin: Powers of two that `delayed` leaves free above that magnitude; 0 by default.
        primary_weights: Hold and gather the weights of these layers in 8 bits only, made of the
            fp32 masters that data-parallel ranks share out. For `tensorwise`, `delayed` and
            `blockwise`.
    """

    recipe: RecipeName | None = None
    keep: tuple[str, ...] = ()
    keep_first: int = 0
    keep_last: int = 0
    history: int | None = None
    largest: Literal["most_recent", "max"] | None = None
    margin: int | None = None
    primary_weights: bool = False

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(0, "keep_first", "keep_last", "margin")
        checks.at_least(1, "history")
        checks.at_most(_MAX_HISTORY, "history")
        checks.at_most(_MAX_MARGIN, "margin")
        for item in fields(self) if self.recipe is None and not checks.errors else ():
            value = getattr(self, item.name)
            if value != item.default:
                shown = list(value) if isinstance(value, tuple) else value
                text = f"{shown} needs precision.recipe, which is null; name a recipe, or leave it "
                checks.add(item.name, text + "out")
        for name in _OF_DELAYED if self.recipe not in (None, "delayed") else ():
            value = getattr(self, name)
            if value is not None:
                text = f"{value} is for precision.recipe delayed, which is {self.recipe}; leave it "
                checks.add(name, text + "out, or use delayed")
        if self.primary_weights and self.recipe in _WITHOUT_PRIMARY:
            text = f"true does not go with recipe {self.recipe}, whose weights are quantised along "
            text += "rows and columns apart, or in pairs: each needs the values; use tensorwise, "
            checks.add("primary_weights", text + "delayed or blockwise, or leave it out")
        checks.done()
