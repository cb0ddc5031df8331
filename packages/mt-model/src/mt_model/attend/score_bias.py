"""Biases of attention scores by distance, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import ClassVar

from mt_files import Checks

MAX_BUCKETS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ScoreBias:
    """A bias of the scores by head and distance. Each kind is a dataclass derived from this one."""

    @property
    def num_buckets(self) -> int:
        """Number of rows of its learned table, with a column for each head; 0 without a table."""
        return 0

    @property
    def shared_table(self) -> str | None:
        """Name of a table that layers share; None for the layer's own."""
        return None


@dataclass(frozen=True, kw_only=True)
class AlibiConfig(ScoreBias):
    """ALiBi (Press et al., 2022): minus the distance, times a slope of the head."""

    type_name: ClassVar[str] = "alibi"

    def slopes(self, num_heads: int) -> tuple[float, ...]:
        """Return the slope of each head of the whole model.

        For n heads, a power of two, the slopes are `2 ** (-8 * i / n)` for i = 1 to n. Other
        numbers take the slopes of the next smaller power of two, then every other slope of its
        double.
        """
        power = 1 << int(log2(num_heads))
        first = [2 ** (-8 * i / power) for i in range(1, power + 1)]
        more = [2 ** (-8 * i / (2 * power)) for i in range(1, 2 * power, 2)]
        return tuple((first + more)[:num_heads])


@dataclass(frozen=True, kw_only=True)
class RelativeConfig(ScoreBias):
    """T5's relative bias (Raffel et al., 2020): a learned number for each head and bucket.

    In each direction the first half of the buckets holds the distances 0, 1, 2 and on; the other
    buckets grow like powers up to `max_distance`, past which all distances share one bucket.

    Attributes:
        buckets: Number of rows of the table.
        max_distance: Distance in tokens from which on the last bucket is used.
        bidirectional: Half of the buckets serve keys after the query; else such keys count as
            distance 0, which suits causal attention.
        table: Name of a table that all layers with this name share (`score_tables.NAME.weight`);
            None for the layer's own (`layers.N.mixer.score_table.weight`).
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
        """Number of buckets of one direction."""
        return self.buckets // 2 if self.bidirectional else self.buckets

    @property
    def exact(self) -> int:
        """Number of distances with a bucket of their own."""
        return self.of_direction // 2

    @property
    def num_buckets(self) -> int:
        """Number of rows of the table."""
        return self.buckets

    @property
    def shared_table(self) -> str | None:
        """Name of the shared table."""
        return self.table
