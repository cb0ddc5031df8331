"""Buckets: slices of flat buffers that one collective reduces, and their allocation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from mt_parallel_state import shard_param, sharding_of
from torch import Tensor, nn

from mt_data_parallel.grad import MAIN_GRAD
from mt_data_parallel.layout import BufferLayout, plan_buckets, plan_whole
from mt_data_parallel.piece import Piece
from mt_data_parallel.reduction import Reduction

Release = Literal["nothing", "gradients", "all"]


@dataclass(frozen=True, kw_only=True)
class Units:
    """What of a model is whole only while it is needed, and in which portions.

    Attributes:
        of: Gives the unit of a parameter by its name; each unit has a bucket of its own. None: the
            buckets are as large as they are, and nothing is released.
        release: `gradients`, from a backward to their reduction, of which every backward has one
            then; `all`, the parameters too, which somebody has to fetch; or `nothing`.
        init: Fills a parameter by its name as soon as it has memory, one bucket at a time.
    """

    of: Callable[[str], str] | None = None
    release: Release = "nothing"
    init: Callable[[str, Tensor], None] | None = None


@dataclass(frozen=True, kw_only=True)
class BufferKey:
    """What the parameters of one flat buffer have in common.

    Attributes:
        grad_dtype: Dtype of their gradients.
        param_dtype: Their own dtype, where the buffer holds parameters too (it is sharded).
        reduction: Over whom their gradients are summed.
        whole: Whether each is kept whole by one rank.
        unit: What of the model is fetched and released together, where anything is.
    """

    grad_dtype: torch.dtype
    param_dtype: torch.dtype | None
    reduction: Reduction
    whole: bool = False
    unit: str | None = None


@dataclass(slots=True, eq=False)
class Bucket:
    """One slice of a flat buffer: what a single collective covers.

    Attributes:
        key: What its parameters have in common.
        grads: The gradients.
        params: The parameters in the same places, where they are sharded.
        own_grads: This rank's part of the sums: of `grads`, or beside it where that is released.
        own_params: This rank's part of the parameters, likewise.
        release: What is whole only while it is needed.
        slots: The parameters, in buffer order.
        pending: How many of them still miss gradients.
        rounds: Reductions from `start` to `finish`: one, or where gradients are released one for
            each backward.
        done: How many of them have begun.
        is_idle: Whether the whole parameters may be released.
    """

    key: BufferKey
    grads: Tensor
    params: Tensor | None
    own_grads: Tensor
    own_params: Tensor | None
    release: Release
    slots: list[Slot] = field(default_factory=list)
    pending: int = 0
    rounds: int = 1
    done: int = 0
    is_idle: bool = False
    _sum: tuple[dist.Work | None, Tensor] | None = None
    _coming: dist.Work | None = None

    @property
    def reduction(self) -> Reduction:
        """Over whom gradients are summed."""
        return self.key.reduction

    @property
    def is_ready(self) -> bool:
        """Whether the next reduction has all it waits for."""
        if self.release == "nothing":
            return self.pending == 0
        return all(slot.accumulated >= min(self.done + 1, slot.expected) for slot in self.slots)

    @property
    def is_here(self) -> bool:
        """Whether the whole parameters are in memory, or on their way."""
        return self.params is None or self.params.untyped_storage().size() > 0

    def expect(self, expected: Mapping[str, int]) -> None:
        """Forget what came, and expect as many gradients of each parameter."""
        self.pending, self.done = len(self.slots), 0
        most = max(expected[slot.name] for slot in self.slots)
        self.rounds = 1 if self.release == "nothing" else most
        for slot in self.slots:
            slot.accumulated, slot.fresh, slot.expected = 0, 0, expected[slot.name]
            slot.param.grad = None

    def receive(self) -> None:
        """Make room for a gradient."""
        self.settle()
        if self.grads.untyped_storage().size() == 0:
            _resize(self.grads, self.grads.numel())

    def launch(self) -> None:
        """Start to sum the gradients; `settle` waits for it."""
        self.receive()
        for slot in self.slots:
            if slot.fresh == 0:
                slot.main_grad.zero_()
            slot.fresh = 0
        self.done += 1
        if self.reduction.shards is None:
            work = _sum(self.grads, self.reduction.replicas)
            self._sum = (work, self.own_grads)
            return
        out = self.own_grads if self.done == 1 else torch.empty_like(self.own_grads)
        work = dist.reduce_scatter_tensor(
            out, self.grads, group=self.reduction.shards, async_op=True
        )
        self._sum = (work, out)
        self.is_idle = self.release == "all"

    def settle(self) -> None:
        """Wait for the sum that is on its way, and release what it was made of."""
        if self._sum is None:
            return
        work, out = self._sum
        self._sum = None
        if work is not None:
            work.wait()
        if out is not self.own_grads:
            self.own_grads.add_(out)
        if self.release != "nothing":
            _resize(self.grads, 0)

    def launch_replicas(self) -> dist.Work | None:
        """Start to sum this rank's part over the replicas, after it was summed inside."""
        if self.reduction.shards is None:
            return None
        return _sum(self.own_grads, self.reduction.replicas)

    def fetch(self) -> None:
        """Start to fetch the parts of the parameters that other ranks have; `arrive` waits."""
        self.is_idle = False
        if self.params is None or self.own_params is None or self._coming is not None:
            return
        if not self.is_here:
            _resize(self.params, self.params.numel())
        self._coming = dist.all_gather_into_tensor(
            self.params, self.own_params, group=self.reduction.shards, async_op=True
        )

    def arrive(self) -> None:
        """Wait for the parameters."""
        work, self._coming = self._coming, None
        if work is not None:
            work.wait()

    def drop(self) -> None:
        """Release the whole parameters, where they are whole only while needed."""
        self.arrive()
        self.is_idle = False
        if self.params is not None and self.release == "all":
            _resize(self.params, 0)


def _sum(grads: Tensor, group: dist.ProcessGroup | None) -> dist.Work | None:
    return None if group is None else dist.all_reduce(grads, group=group, async_op=True)


def _resize(tensor: Tensor, numel: int) -> None:
    """Give the memory of a flat tensor back, or take it again; its views stay views."""
    tensor.untyped_storage().resize_(numel * tensor.element_size())


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
        fresh: Gradients since the last reduction.
        expected: Gradients that `start` announced.
    """

    name: str
    param: Tensor
    main_grad: Tensor
    piece: Piece | None
    bucket: Bucket
    start: int
    accumulated: int = 0
    fresh: int = 0
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


def allocate(
    params: Mapping[str, Tensor],
    key: BufferKey,
    layout: BufferLayout,
    units: Units,
) -> list[Bucket]:
    """Allocate the buckets of one buffer, with a slot per parameter.

    Where the buffer is sharded, the parameters move into it and become row-major.
    """
    buckets: list[Bucket] = []
    for index, bounds in enumerate(layout.buckets):
        places = [place for place in layout.params if place.bucket == index]
        device = params[places[0].name].device
        bucket = _empty_bucket(key, bounds.end - bounds.start, device, units.release)
        for place in places:
            param, start = params[place.name], place.start - bounds.start
            if bucket.params is None:
                slot = _plain_slot(param, place.name, start, bucket)
            else:
                slot = _sharded_slot(param, place.name, start, bucket, bucket.params)
            if units.init is not None:
                units.init(place.name, param)
            if bucket.release == "nothing":
                setattr(param, MAIN_GRAD, slot.main_grad)
            bucket.slots.append(slot)
        if bucket.params is not None and bucket.own_params is not None:
            size = bucket.own_params.numel()
            first = key.reduction.shard * size
            bucket.own_params.copy_(bucket.params[first : first + size])
            for slot in bucket.slots:
                slot.piece = _piece(slot, bucket.own_params, bucket)
            bucket.drop()
        if bucket.release != "nothing":
            _resize(bucket.grads, 0)
        buckets.append(bucket)
    return buckets


def _empty_bucket(key: BufferKey, numel: int, device: torch.device, release: Release) -> Bucket:
    sharded = key.reduction.shards is not None
    release = release if sharded else "nothing"
    grads = torch.zeros(numel, dtype=key.grad_dtype, device=device)
    params = torch.zeros(numel, dtype=key.param_dtype, device=device) if sharded else None
    size = numel // key.reduction.num_shards
    own = slice(key.reduction.shard * size, (key.reduction.shard + 1) * size)
    own_grads, own_params = grads[own], None if params is None else params[own]
    if release != "nothing":
        own_grads = torch.zeros_like(own_grads)
    if release == "all" and own_params is not None:
        own_params = torch.zeros_like(own_params)
    return Bucket(key, grads, params, own_grads, own_params, release)


def _plain_slot(param: Tensor, name: str, start: int, bucket: Bucket) -> Slot:
    if not param.untyped_storage().size():  # it was on the meta device
        param.data = torch.empty_like(param)
    # In the parameter's own order of memory, which fused optimizers rely on.
    strides = torch.empty_like(param, device="meta").stride()
    main_grad = bucket.grads.as_strided(param.shape, strides, start)
    piece = Piece(name=name, source=param, param=param, start=0, end=param.numel())
    return Slot(name, param, main_grad, piece, bucket, start)


def _sharded_slot(param: Tensor, name: str, start: int, bucket: Bucket, params: Tensor) -> Slot:
    """Move a parameter into the flat one."""
    inside = slice(start, start + param.numel())
    view = params[inside].view(param.shape)
    if param.untyped_storage().size():
        view.copy_(param.detach())
    param.data = view
    main_grad = bucket.grads[inside].view(param.shape)
    return Slot(name, param, main_grad, None, bucket, start)


def _piece(slot: Slot, own_params: Tensor, bucket: Bucket) -> Piece | None:
    """Make a piece of our part of a parameter."""
    param, size = slot.param, own_params.numel()
    base = bucket.reduction.shard * size
    first, last = max(slot.start, base), min(slot.start + param.numel(), base + size)
    if first >= last:
        return None
    shape = param.shape if last - first == param.numel() else (last - first,)
    part = slice(first - base, last - base)
    own = nn.Parameter(own_params[part].view(shape))
    setattr(own, MAIN_GRAD, bucket.own_grads[part].view(shape))
    if isinstance(param, nn.Parameter) and shape == param.shape:
        record = sharding_of(param)
        shard_param(own, record.spec, partial_grad=record.partial_grad, is_copy=record.is_copy)
    return Piece(
        name=slot.name,
        source=param,
        param=own,
        start=first - slot.start,
        end=last - slot.start,
        peers=bucket.reduction.peers,
        replica=bucket.reduction.replica,
    )


def _step_cost(param: Tensor) -> float:
    """Return the relative cost of orthogonalising a matrix; vectors cost their elements."""
    if param.dim() < 2:
        return float(param.numel())
    rows, columns = param.numel() // param.shape[-1], param.shape[-1]
    return float(max(rows, columns)) * min(rows, columns) ** 2
