"""The section `quantization` of a run's configuration: training of weights that will be rounded."""

from __future__ import annotations

from dataclasses import dataclass

from mt_files import Checks

from mt_train.config.limits import path_field


@dataclass(frozen=True, kw_only=True)
class QuantizationSection:
    """Quantisation-aware training: linear layers of blocks round as they will in inference.

    Attributes:
        recipe: Recipe of mt-quant, such as `int8` or `fp8-weight`, that rounds to the nearest value
            and needs no calibration data. By default nothing is rounded.
        group_size: Number of neighbouring inputs that share a scale, for a recipe of int4; by
            default the largest of 128, 64 and 32 that divides a layer's inputs.
        config: YAML file with rules of mt-quant, in place of a recipe.
    """

    recipe: str | None = None
    group_size: int | None = None
    config: str | None = path_field("")

    @property
    def given(self) -> str | None:
        """The recipe or the file; None if nothing is rounded."""
        return self.config if self.recipe is None else self.recipe

    def __post_init__(self) -> None:
        checks = Checks(self)
        if self.recipe is not None and self.config is not None:
            checks.add("config", "contradicts quantization.recipe; leave one of them out")
        if self.group_size is not None and self.recipe is None:
            checks.add(
                "group_size", "is for quantization.recipe; rules of a file name their groups"
            )
        checks.done()
