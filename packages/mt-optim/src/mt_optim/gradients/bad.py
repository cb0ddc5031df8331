"""Which gradients keep a step from being taken, by rank and name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from mt_data_parallel import ParamShard
from mt_parallel_state import ParallelState, share_json
from torch import Tensor

from mt_optim.gradients.statistics import WORLD

MOST_NAMED = 16  # gradients that a report names
_MOST_PER_RANK = 8


@dataclass(frozen=True, kw_only=True)
class BadGradient:
    """A gradient that is not finite, or one of the largest where the norm is too large.

    Attributes:
        rank: The rank that has it, in the layout. Where a `GradBuffer` sums gradients over ranks
            it is the one whose own gradient it was, before the sum.
        name: Its parameter.
        largest: The greatest magnitude in it on that rank; NaN where it has a NaN.
        in_sum: Whether only the sum over ranks is not finite, and the gradients of all ranks were;
            `rank` steps that part of it then.
    """

    rank: int
    name: str
    largest: float
    in_sum: bool = False

    @property
    def what(self) -> str:
        """What it is: nan, inf or large."""
        if math.isnan(self.largest):
            return "nan"
        return "inf" if math.isinf(self.largest) else "large"

    def __str__(self) -> str:
        size = f" ({self.largest:.4g})" if self.what == "large" else ""
        where = " in the sum, of gradients that were finite on all ranks" if self.in_sum else ""
        return f"rank {self.rank} {self.name} {self.what}{size}{where}"


def find_bad(
    shards: Sequence[ParamShard], state: ParallelState, *, scale: float = 1.0
) -> tuple[tuple[BadGradient, ...], int]:
    """Name the gradients that are not finite on any rank, or the largest ones if all are finite.

    They are the ranks' own ones where their `GradBuffer` noted how large these were before it
    summed them. Only if all of those are finite, the sums are looked at.

    Every rank calls it and gets the same. It waits for the device and communicates, so it is asked
    only when a step is not taken.

    Args:
        shards: This rank's.
        state: Process groups and this rank's place in them.
        scale: What the gradients are to be divided by.

    Returns:
        The first of them, by parameter and rank, and how many there are.
    """
    named = [(shard.name, grad) for shard in shards if (grad := shard.grad) is not None]
    sums = dict(zip((n for n, _ in named), magnitudes([grad for _, grad in named]), strict=True))
    added: dict[str, float] = {}
    for phase in {id(shard.phase): shard.phase for shard in shards}.values():
        added |= {} if phase is None else phase.addends.magnitudes()
    own = added | {name: size for name, size in sums.items() if name not in added}
    for found, in_sum in ((own, False), (sums, True)):
        bad, total = _not_finite(found, state, in_sum=in_sum)
        if total:
            return bad, total
    return _largest(own, state, scale)


def _not_finite(
    found: Mapping[str, float], state: ParallelState, *, in_sum: bool
) -> tuple[tuple[BadGradient, ...], int]:
    """Name what is not finite on any rank."""
    wrong = [(name, str(size)) for name, size in found.items() if not math.isfinite(size)]
    report = {"wrong": len(wrong), "named": wrong[:_MOST_PER_RANK]} if wrong else None
    reports = share_json(report, state.group(WORLD), device=state.device)
    bad = [
        BadGradient(rank=rank, name=name, largest=float(size), in_sum=in_sum)
        for rank, report in enumerate(reports)
        for name, size in (report or {"named": []})["named"]
    ]
    order = {name: number for number, name in enumerate(dict.fromkeys(item.name for item in bad))}
    bad.sort(key=lambda item: (order[item.name], item.rank))
    return tuple(bad[:MOST_NAMED]), sum(report["wrong"] for report in reports if report)


def _largest(
    found: Mapping[str, float], state: ParallelState, scale: float
) -> tuple[tuple[BadGradient, ...], int]:
    """Name the largest of all ranks."""
    own = sorted(found.items(), key=lambda pair: -pair[1])[:_MOST_PER_RANK]
    bad = [
        BadGradient(rank=rank, name=name, largest=size / scale)
        for rank, named in enumerate(share_json(own, state.group(WORLD), device=state.device))
        for name, size in named
    ]
    bad.sort(key=lambda item: -item.largest)
    return tuple(bad[:_MOST_PER_RANK]), min(len(bad), _MOST_PER_RANK)


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
