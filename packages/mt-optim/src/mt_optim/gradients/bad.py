"""The gradients because of which a step is skipped, by rank and name."""

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
    """A gradient that is not finite, or one of the largest if the norm is too large.

    Attributes:
        rank: Its rank in the layout. If a `GradBuffer` sums gradients over ranks, this is the rank
            whose own gradient was at fault before the sum.
        name: Name of the parameter.
        largest: Largest magnitude of an element on that rank; NaN if there is a NaN.
        in_sum: Whether only the sum over ranks is not finite. `rank` steps that part of it then.
    """

    rank: int
    name: str
    largest: float
    in_sum: bool = False

    @property
    def what(self) -> str:
        """The kind of fault: nan, inf or large."""
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

    Each rank's own gradients are checked first, as its `GradBuffer` recorded them before the sum;
    the sums are checked only if all of these are finite.

    Every rank calls it and gets the same result. It waits for the device and communicates, so it
    runs only if a step is skipped.

    Args:
        shards: This rank's shards.
        state: Process groups and this rank's place in them.
        scale: The loss scale, by which gradients are divided.

    Returns:
        The first gradients at fault, by parameter and rank, and their total number.
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
    """Name the gradients that are not finite on some rank."""
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
    """Name the largest gradients of all ranks."""
    own = sorted(found.items(), key=lambda pair: -pair[1])[:_MOST_PER_RANK]
    bad = [
        BadGradient(rank=rank, name=name, largest=size / scale)
        for rank, named in enumerate(share_json(own, state.group(WORLD), device=state.device))
        for name, size in named
    ]
    bad.sort(key=lambda item: -item.largest)
    return tuple(bad[:_MOST_PER_RANK]), min(len(bad), _MOST_PER_RANK)


def magnitudes(tensors: Sequence[Tensor]) -> list[float]:
    """Return the largest magnitude in each tensor, NaN if it has a NaN; wait once."""
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
