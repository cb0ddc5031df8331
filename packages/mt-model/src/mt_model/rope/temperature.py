"""A temperature of attention by position, as a frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mt_files import Checks

if TYPE_CHECKING:
    from torch import Tensor

_LONGEST = 1 << 30  # tokens


@dataclass(frozen=True, kw_only=True)
class TemperatureConfig:
    """Factors of queries by position, which keep attention sharp over long sequences.

    The query at position p is multiplied by `1 + strength * ln(1 + floor((p + 1) / interval))`
    (Nakanishi, 2025; Llama 4).

    Attributes:
        strength: Coefficient of the logarithm.
        interval: Number of tokens over which the factor stays the same.
    """

    strength: float = 0.1
    interval: int = 8192

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.above(0, "strength")
        checks.at_least(1, "interval")
        checks.at_most(_LONGEST, "interval")
        checks.done()

    def factors(self, positions: Tensor) -> Tensor:
        """Return the factor of the query at each position, in fp64.

        Shape:
            positions: any. Returns the same shape.
        """
        steps = (positions.double() + 1).div(self.interval).floor()
        return 1 + self.strength * steps.log1p()
