"""Measurements of the whole model's gradient, every logical element counted once."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import cast

import torch
import torch.distributed as dist
from mt_data_parallel import ParamShard
from mt_files import check_type
from mt_parallel_state import ParallelState, is_owner, sharding_of
from torch import Tensor, nn

# Elements whose squares are summed in fp32 before fp64 takes over. One fp32 norm over millions of
# elements is off by 1e-4 on CPUs; rows of this length keep 1e-7 at about the same speed.
_ROW = 512
WORLD = "tp-cp-dp-pp"  # all ranks
_LAYER = re.compile(r"(?:^|.*\.)layers\.\d+(?=\.)")


@dataclass(frozen=True, kw_only=True)
class GradStatistics:
    """Statistics of the gradient of some parameters.

    Attributes:
        norm: The L2 norm.
        largest: The largest magnitude of an element; inf if one is not finite.
        zeros: Number of zeros, including all elements of a missing gradient.
    """

    norm: float
    largest: float
    zeros: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of a part, to be added up over ranks and parts.

    Attributes:
        square: Sum of the squares.
        largest: The largest magnitude; inf if one is not finite, 0 if it was not requested.
        zeros: Number of zeros; 0 if it was not requested.
    """

    square: float
    largest: float = 0.0
    zeros: int = 0


def joined(parts: Iterable[Measured], *, scale: float = 1.0) -> GradStatistics:
    """Join the measurements of parts, for gradients divided by `scale`."""
    parts = list(parts)
    # In order, as the device adds them in `StepGuard.decide`; Python's `sum` compensates.
    square = reduce(operator.add, (part.square for part in parts), 0.0)
    return GradStatistics(
        norm=math.sqrt(square) / scale,
        largest=max((part.largest for part in parts), default=0.0) / scale,
        zeros=sum(part.zeros for part in parts),
    )


def by_layer(name: str) -> str:
    """Return the layer of a parameter, or the first word of its name.

    Example:
        >>> by_layer("layers.3.mixer.qkv.weight"), by_layer("embedding.weight")
        ('layers.3', 'embedding')
    """
    check_type("name", name, str)
    found = _LAYER.match(name)
    return name.split(".")[0] if found is None else found[0]


class GradMeter:
    """Measures the gradients of a model of which this rank holds a part.

    Sharding records say which elements this rank counts (`is_owner`). The others are checked too:
    if such a gradient is not finite, the norm is not finite either, so every rank learns of it.

    Args:
        parts: Groups of shards to measure together; the same number on every rank, some may be
            empty.
        state: Process groups and this rank's place in them.
        zeros: Whether zeros are counted.
        largest: Whether the largest magnitudes are found, which communicates once more.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[ParamShard]],
        state: ParallelState,
        *,
        zeros: bool = False,
        largest: bool = False,
    ) -> None:
        self._own: list[list[ParamShard]] = [[] for _ in parts]
        self._others: list[list[ParamShard]] = [[] for _ in parts]
        for part, own, others in zip(parts, self._own, self._others, strict=True):
            for shard in part:
                (own if counts_here(shard, state) else others).append(shard)
        self._state, self._zeros, self._largest = state, zeros, largest

    @torch.no_grad()
    def sums(self, also: Tensor | None = None) -> Tensor:
        """Measure each part; communicates once or twice, and does not wait for the device.

        Args:
            also: Numbers of this rank, on the device, to sum over all ranks in the same message.

        Shape:
            One dim of fp64: the sums of `also`, the squares of each part, and then, where these
            are asked for, its zeros and its greatest magnitude.
        """
        device = self._state.device
        sums = [self._squares(*pair) for pair in zip(self._own, self._others, strict=True)]
        if self._zeros:
            sums += [_zeros(part, device) for part in self._own]
        summed = torch.stack(sums)
        if also is not None:
            summed = torch.cat([also.to(summed), summed])
        group = self._state.group(WORLD)
        if group is not None:
            dist.all_reduce(summed, group=group)
        # Maxima can't travel in a sum.
        if self._largest:
            most = torch.stack([_largest(part, device) for part in self._own])
            if group is not None:
                dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
            summed = torch.cat([summed, most])
        return summed

    @property
    def width(self) -> int:
        """The length of `sums` without `also`."""
        return len(self._own) * (1 + self._zeros + self._largest)

    def read(self, found: Sequence[float]) -> tuple[list[Measured], list[float]]:
        """Split `sums` into the measurements of each part, and the sums of `also`."""
        extra, count = len(found) - self.width, len(self._own)
        others, values = list(found[:extra]), found[extra:]
        zeros = values[count : 2 * count] if self._zeros else [0.0] * count
        largest = values[-count:] if self._largest else [0.0] * count
        return [
            Measured(square=square, largest=most, zeros=int(zero))
            for square, most, zero in zip(values[:count], largest, zeros, strict=True)
        ], others

    def _squares(self, own: Sequence[ParamShard], others: Sequence[ParamShard]) -> Tensor:
        """Sum squares; elements that other ranks count add 0, or NaN if they are not finite."""
        device, rest = self._state.device, _grads(others)
        total = _squared_sum(_grads(own), device)
        return total + 0.0 * _squared_sum(rest, device) if rest else total


def counts_here(shard: ParamShard, state: ParallelState) -> bool:
    """Whether this rank counts its shard of the parameter."""
    sharding = sharding_of(cast("nn.Parameter", shard.source))
    peers = [peer - state.offset for peer in shard.peers]
    return is_owner(sharding, state.layout, state.rank, peers=peers, replica=shard.replica)


def _grads(shards: Iterable[ParamShard]) -> list[Tensor]:
    return [grad.detach() for shard in shards if (grad := shard.grad) is not None]


def _zeros(shards: Sequence[ParamShard], device: torch.device) -> Tensor:
    """Count zeros, including all elements of a missing gradient."""
    missing = float(sum(shard.param.numel() for shard in shards if shard.grad is None))
    count = torch.full((), missing, dtype=torch.float64, device=device)
    for grad in _grads(shards):
        count += (grad.numel() - torch.count_nonzero(grad)).to(device)
    return count


def _largest(shards: Sequence[ParamShard], device: torch.device) -> Tensor:
    sizes = [torch.linalg.vector_norm(g, math.inf) for g in _grads(shards) if g.numel()]
    if not sizes:
        return torch.zeros((), dtype=torch.float64, device=device)
    most = torch.stack([size.to(device, torch.float64) for size in sizes]).amax()
    # The maximum of NaN and a number over ranks depends on the library.
    return most.nan_to_num(nan=math.inf, posinf=math.inf)


def _squared_sum(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of all elements as an fp64 scalar on a device."""
    norms: list[Tensor] = []
    for grad in grads:
        wide = grad if grad.dtype in (torch.float32, torch.float64) else grad.float()
        rest = wide.numel() % _ROW
        if rest:
            flat = wide.reshape(-1)
            norms.append(torch.linalg.vector_norm(flat[-rest:]).view(1))
            wide = flat[:-rest]
        if wide.numel():
            norms.append(torch.linalg.vector_norm(wide.reshape(-1, _ROW), dim=1))
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.cat(norms).double().square().sum().to(device)
