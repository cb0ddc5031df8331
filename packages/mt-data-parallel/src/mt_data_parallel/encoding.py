"""Parameters stored and gathered as one-byte codes, and updated in full precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedShard:
    """The part of an encoded parameter that one rank steps, with the place of its codes.

    Attributes:
        name: The parameter's name.
        source: The parameter; only its shape, dtype and sharding record may be read.
        values: The elements in full precision; empty if the rank has none.
        codes: The memory for their codes.
        start: Offset of the first element in the flattened (row-major) parameter.
        shards: The group with the other parts; None if this is the whole parameter.

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
    """A format of one-byte codes that replace some parameters' values, for `shard(encoding=)`.

    `PrimaryWeights` of mt-fp8 is one. Only codes are gathered and held for the whole parameter, a
    quarter of the memory of fp32. Each rank steps its shard in fp32 and encodes it after the step.
    """

    def encodes(self, name: str, param: Tensor) -> bool:
        """Return whether a parameter is held in codes; called once; the same on all ranks."""
        ...

    def place(self, name: str, codes: Tensor) -> None:
        """Record the memory for the codes of a whole parameter.

        Shape:
            codes: the parameter's, of uint8.
        """
        ...

    def encode(self, parts: Sequence[EncodedShard]) -> None:
        """Write the codes of this rank's parts of all encoded parameters.

        Ranks of `shards` call it together, with the same parameters in the same order.
        """
        ...
