"""Buckets: slices of flat buffers that one collective reduces, and their allocation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from mt_parallel_state import shard_param, sharding_of
from torch import Tensor, nn

from mt_data_parallel.grad import MAIN_GRAD
from mt_data_parallel.layout import BufferLayout, plan_buckets, plan_whole
from mt_data_parallel.piece import Piece
from mt_data_parallel.reduction import Reduction


@dataclass(frozen=True, kw_only=True)
class BufferKey:
    """What the parameters of one flat buffer have in common.

    Attributes:
        grad_dtype: Dtype of their gradients.
        param_dtype: Their own dtype, where the buffer holds parameters too (it is sharded).
        reduction: Over whom their gradients are summed.
        whole: Whether each is kept whole by one rank.
    """

    grad_dtype: torch.dtype
    param_dtype: torch.dtype | None
    reduction: Reduction
    whole: bool = False


@dataclass(slots=True, eq=False)
class Bucket:
    """One slice of a flat buffer: what a single collective covers.

    Attributes:
        reduction: Over whom.
        grads: The gradients.
        params: The parameters in the same places, where they are sharded.
        slots: The parameters, in buffer order.
        pending: How many of them still miss gradients.
    """

    reduction: Reduction
    grads: Tensor
    params: Tensor | None
    slots: list[Slot] = field(default_factory=list)
    pending: int = 0

    @property
    def bounds(self) -> tuple[int, int]:
        """Where this rank's part begins and ends."""
        part = self.grads.numel() // self.reduction.num_shards
        return self.reduction.shard * part, (self.reduction.shard + 1) * part

    def launch(self) -> dist.Work | None:
        """Start to sum the gradients; `launch_replicas` comes after it where both are asked for."""
        for slot in self.slots:
            if slot.accumulated == 0:
                slot.main_grad.zero_()
        if self.reduction.shards is not None:
            start, end = self.bounds
            return dist.reduce_scatter_tensor(
                self.grads[start:end], self.grads, group=self.reduction.shards, async_op=True
            )
        return self._sum_replicas(self.grads)

    def launch_replicas(self) -> dist.Work | None:
        """Start to sum this rank's part over the replicas, after it was summed inside."""
        if self.reduction.shards is None:
            return None
        start, end = self.bounds
        return self._sum_replicas(self.grads[start:end])

    def gather(self) -> dist.Work | None:
        """Start to fetch the parts of the parameters that other ranks stepped."""
        if self.params is None or self.reduction.shards is None:
            return None
        start, end = self.bounds
        return dist.all_gather_into_tensor(
            self.params, self.params[start:end], group=self.reduction.shards, async_op=True
        )

    def _sum_replicas(self, grads: Tensor) -> dist.Work | None:
        if self.reduction.replicas is None:
            return None
        return dist.all_reduce(grads, group=self.reduction.replicas, async_op=True)


@dataclass(slots=True, eq=False)
class Slot:
    """One parameter, its view into the flat buffer and what arrived since `start`.

    Attributes:
        name: The parameter's name.
        param: The parameter.
        main_grad: Its gradient in the bucket.
        piece: What of it this rank steps, if anything.
        bucket: Where it lies.
        start: Its first element there.
        accumulated: Gradients since `start`.
        expected: Gradients that `start` announced.
    """

    name: str
    param: Tensor
    main_grad: Tensor
    piece: Piece | None
    bucket: Bucket
    start: int
    accumulated: int = 0
    expected: int = 1


def plan(
    params: Mapping[str, Tensor],
    key: BufferKey,
    *,
    bucket_size: int | None,
    alone: Collection[str],
) -> BufferLayout:
    """Lay out the parameters of one buffer."""
    numels = {name: param.numel() for name, param in params.items()}
    ranks = key.reduction.num_shards
    if key.whole:
        costs = {name: _step_cost(param) for name, param in params.items()}
        return plan_whole(
            numels, costs=costs, bucket_size=bucket_size, world_size=ranks, alone=alone
        )
    replicas = key.reduction.replicas
    ranks *= 1 if replicas is None else replicas.size()
    return plan_buckets(numels, bucket_size=bucket_size, world_size=ranks, alone=alone)


def allocate(params: Mapping[str, Tensor], key: BufferKey, layout: BufferLayout) -> list[Bucket]:
    """Allocate the buckets of one buffer, with a slot per parameter.

    Where the buffer is sharded, the parameters move into it and become row-major.
    """
    device = params[layout.params[0].name].device
    sharded = key.reduction.shards is not None
    buckets: list[Bucket] = []
    for bounds in layout.buckets:
        numel = bounds.end - bounds.start
        grads = torch.zeros(numel, dtype=key.grad_dtype, device=device)
        flat = torch.zeros(numel, dtype=key.param_dtype, device=device) if sharded else None
        buckets.append(Bucket(reduction=key.reduction, grads=grads, params=flat))
    for place in layout.params:
        bucket, param = buckets[place.bucket], params[place.name]
        start = place.start - layout.buckets[place.bucket].start
        if bucket.params is None:
            slot = _plain_slot(param, place.name, start, bucket)
        else:
            part = layout.part_of(place.name, key.reduction.shard, key.reduction.num_shards)
            slot = _sharded_slot(param, place.name, (start, part), bucket, bucket.params)
        setattr(param, MAIN_GRAD, slot.main_grad)
        bucket.slots.append(slot)
    return buckets


def _plain_slot(param: Tensor, name: str, start: int, bucket: Bucket) -> Slot:
    # In the parameter's own order of memory, which fused optimizers rely on.
    strides = torch.empty_like(param, device="meta").stride()
    main_grad = bucket.grads.as_strided(param.shape, strides, start)
    piece = Piece(name=name, source=param, param=param, start=0, end=param.numel())
    return Slot(name, param, main_grad, piece, bucket, start)


def _sharded_slot(
    param: Tensor,
    name: str,
    place: tuple[int, tuple[int, int] | None],
    bucket: Bucket,
    params: Tensor,
) -> Slot:
    """Move a parameter into the flat one, and make a piece of our part of it."""
    start, part = place
    inside = slice(start, start + param.numel())
    view = params[inside].view(param.shape)
    view.copy_(param.detach())
    param.data = view
    main_grad = bucket.grads[inside].view(param.shape)
    if part is None:
        return Slot(name, param, main_grad, None, bucket, start)
    shape = param.shape if part == (0, param.numel()) else (part[1] - part[0],)
    own = nn.Parameter(view.view(-1)[slice(*part)].view(shape))
    setattr(own, MAIN_GRAD, main_grad.view(-1)[slice(*part)].view(shape))
    if isinstance(param, nn.Parameter) and shape == param.shape:
        record = sharding_of(param)
        shard_param(own, record.spec, partial_grad=record.partial_grad, is_copy=record.is_copy)
    piece = Piece(
        name=name,
        source=param,
        param=own,
        start=part[0],
        end=part[1],
        peers=bucket.reduction.peers,
        replica=bucket.reduction.replica,
    )
    return Slot(name, param, main_grad, piece, bucket, start)


def _step_cost(param: Tensor) -> float:
    """Return the relative cost of orthogonalising a matrix; vectors cost their elements."""
    if param.dim() < 2:
        return float(param.numel())
    rows, columns = param.numel() // param.shape[-1], param.shape[-1]
    return float(max(rows, columns)) * min(rows, columns) ** 2
