"""Parameters that ranks hold and fetch as codes, while they step their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedShard:
    """What one rank steps of an encoded parameter, and where its codes go.

    Attributes:
        name: The parameter's name.
        source: The parameter, of which only shape, dtype and sharding record are to be read.
        values: The elements in the precision they are stepped in; none where the rank has none.
        codes: Where their codes go.
        start: The first one's place in the flattened (row-major) parameter.
        shards: Ranks with the other parts; None where this is all of it.

    Shape:
        values: [n]. codes: [n] of uint8.
    """

    name: str
    source: Tensor
    values: Tensor
    codes: Tensor
    start: int
    shards: dist.ProcessGroup | None


class Encoding(Protocol):
    """Codes of one byte in the place of some parameters' values, as `shard` takes it.

    `PrimaryWeights` of mt-fp8 is one. What is gathered, and whole in memory, is codes: a quarter of
    what fp32 parameters take. Ranks step their shares in fp32 and encode them after each step.
    """

    def encodes(self, name: str, param: Tensor) -> bool:
        """Say whether a parameter is held in codes; asked once, the same on all ranks."""
        ...

    def place(self, name: str, codes: Tensor) -> None:
        """Take note of where the codes of a whole parameter are, whenever they are in memory.

        Shape:
            codes: the parameter's, of uint8.
        """
        ...

    def encode(self, parts: Sequence[EncodedShard]) -> None:
        """Write the codes of this rank's parts of all encoded parameters.

        Ranks of `shards` call it together, with the same parameters in the same order.
        """
        ...
