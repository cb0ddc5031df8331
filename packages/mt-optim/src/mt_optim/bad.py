"""Which gradients keep a step from being taken, by rank and name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from mt_data_parallel import Piece
from mt_parallel_state import ParallelState
from torch import Tensor

from mt_optim.agreement import gathered

MOST_NAMED = 16  # gradients that a report names
_MOST_PER_RANK = 8


@dataclass(frozen=True, kw_only=True)
class BadGradient:
    """A gradient that is not finite, or one of the largest where the norm is too large.

    Attributes:
        rank: The rank that has it, in the layout.
        name: Its parameter.
        largest: The greatest magnitude in it on that rank; NaN where it has a NaN.
    """

    rank: int
    name: str
    largest: float

    @property
    def what(self) -> str:
        """What it is: nan, inf or large."""
        if math.isnan(self.largest):
            return "nan"
        return "inf" if math.isinf(self.largest) else "large"

    def __str__(self) -> str:
        size = f" ({self.largest:.4g})" if self.what == "large" else ""
        return f"rank {self.rank} {self.name} {self.what}{size}"


def find_bad(
    pieces: Sequence[Piece], state: ParallelState, *, scale: float = 1.0
) -> tuple[tuple[BadGradient, ...], int]:
    """Name the gradients that are not finite on any rank, or the largest ones if all are finite.

    Every rank calls it and gets the same. It waits for the device and communicates, so it is asked
    only when a step is not taken.

    Args:
        pieces: This rank's.
        state: Process groups and this rank's place in them.
        scale: What the gradients are to be divided by.

    Returns:
        The first of them, by parameter and rank, and how many there are.
    """
    named = [(piece.name, grad) for piece in pieces if (grad := piece.grad) is not None]
    sizes = magnitudes([grad for _, grad in named])
    found = [(name, size / scale) for (name, _), size in zip(named, sizes, strict=True)]
    wrong = [(name, size) for name, size in found if not math.isfinite(size)]
    large = sorted(found, key=lambda pair: -pair[1])[:_MOST_PER_RANK] if not wrong else []
    own = [[name, str(size)] for name, size in (wrong[:_MOST_PER_RANK] or large)]
    reports = gathered({"wrong": len(wrong), "named": own}, state)
    total = sum(report["wrong"] for report in reports)
    bad = [
        BadGradient(rank=rank, name=name, largest=float(size))
        for rank, report in enumerate(reports)
        if report["wrong"] or not total
        for name, size in report["named"]
    ]
    if not total:
        bad.sort(key=lambda item: -item.largest)
        return tuple(bad[:_MOST_PER_RANK]), min(len(bad), _MOST_PER_RANK)
    order = {name: number for number, name in enumerate(dict.fromkeys(item.name for item in bad))}
    bad.sort(key=lambda item: (order[item.name], item.rank))
    return tuple(bad[:MOST_NAMED]), total


def magnitudes(tensors: Sequence[Tensor]) -> list[float]:
    """Return the greatest magnitude of each, NaN where there is a NaN; waits once."""
    if not tensors:
        return []
    device = tensors[0].device
    # The greatest magnitude is exact in any dtype.
    sizes = [
        torch.linalg.vector_norm(t.detach(), math.inf).double().to(device)
        if t.numel()
        else torch.zeros((), dtype=torch.float64, device=device)
        for t in tensors
    ]
    return torch.stack(sizes).tolist()
