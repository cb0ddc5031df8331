"""What is added to the scores of attention by the distance of query and key, as values."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import ClassVar

from mt_files import Checks

MAX_BUCKETS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ScoreBias:
    """A bias of the scores by head and distance. A kind is a dataclass below this one."""

    @property
    def num_buckets(self) -> int:
        """Rows of its learned table, which has a number for each head; 0 without one."""
        return 0

    @property
    def shared_table(self) -> str | None:
        """Name of the table that layers have in common; None for one of the layer's own."""
        return None


@dataclass(frozen=True, kw_only=True)
class AlibiConfig(ScoreBias):
    """ALiBi (Press et al., 2022): minus the distance, times a slope of the head."""

    type_name: ClassVar[str] = "alibi"

    def slopes(self, num_heads: int) -> tuple[float, ...]:
        """Return the slope of each head of the whole model.

        For n heads, a power of two, they are `2 ** (-8 * i / n)` for i = 1 to n. For other numbers
        those of the next smaller power of two come first, then every other one of its double.
        """
        power = 1 << int(log2(num_heads))
        first = [2 ** (-8 * i / power) for i in range(1, power + 1)]
        more = [2 ** (-8 * i / (2 * power)) for i in range(1, 2 * power, 2)]
        return tuple((first + more)[:num_heads])


@dataclass(frozen=True, kw_only=True)
class RelativeConfig(ScoreBias):
    """T5's relative bias (Raffel et al., 2020): a learned number for each head and bucket.

    Of the buckets of a direction the first half are the distances 0, 1, 2 and on; the others grow
    like powers up to `max_distance`, past which all distances are one.

    Attributes:
        buckets: Rows of the table.
        max_distance: Tokens from which on all distances are in the last bucket.
        bidirectional: Half of the buckets are for keys after the query; else these are at
            distance 0, which suits causal attention.
        table: Name of the table: layers that say the same share it (`score_tables.NAME.weight`).
            None: the layer has its own (`layers.N.mixer.score_table.weight`).
    """

    type_name: ClassVar[str] = "relative"

    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = False
    table: str | None = "relative"

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(4 if self.bidirectional else 2, "buckets")
        checks.at_most(MAX_BUCKETS, "buckets")
        checks.done()
        if self.bidirectional and self.buckets % 2:
            checks.add("buckets", f"{self.buckets} is odd, and each direction has half of them")
        if self.max_distance <= self.exact:
            text = f"{self.max_distance} is not above the {self.exact} distances with own buckets"
            checks.add("max_distance", text)
        if self.table is not None and not self.table.isidentifier():
            checks.add("table", f"{self.table[:80]!r} is no name; use a word, or null")
        checks.done()

    @property
    def of_direction(self) -> int:
        """Buckets of one direction."""
        return self.buckets // 2 if self.bidirectional else self.buckets

    @property
    def exact(self) -> int:
        """Distances that have a bucket of their own."""
        return self.of_direction // 2

    @property
    def num_buckets(self) -> int:
        """Rows of the table."""
        return self.buckets

    @property
    def shared_table(self) -> str | None:
        """Name of the table that layers have in common."""
        return self.table
