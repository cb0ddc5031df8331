"""The memory of buckets, and its views: parameters, gradients and shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from mt_parallel_state import shard_param, sharding_of, twin_group
from torch import Tensor, nn

from mt_data_parallel.bucket import Bucket, BufferKey, Slot, resize
from mt_data_parallel.encoding import Encoding
from mt_data_parallel.grad import MAIN_GRAD
from mt_data_parallel.layout import BufferLayout, plan_buckets, plan_whole
from mt_data_parallel.param_shard import ParamShard, Phase
from mt_data_parallel.partial import is_partial
from mt_data_parallel.policy import Release, ShardingPolicy


def plan(
    params: Mapping[str, Tensor],
    key: BufferKey,
    *,
    bucket_size: int | None,
    alone: Collection[str],
    pad_for_bandwidth: bool,
) -> BufferLayout:
    """Lay out the parameters of one buffer."""
    numels = {name: param.numel() for name, param in params.items()}
    shards, replicas = key.reduction.num_shards, key.reduction.replicas
    copies = 1 if replicas is None else replicas.size()
    if key.whole:
        return plan_whole(
            numels,
            costs={name: _step_cost(param) for name, param in params.items()},
            bucket_size=bucket_size,
            world_size=shards,
            replicas=copies,
            alone=alone,
            pad_for_bandwidth=pad_for_bandwidth,
        )
    return plan_buckets(
        numels,
        bucket_size=bucket_size,
        world_size=shards * copies,
        alone=alone,
        pad_for_bandwidth=pad_for_bandwidth,
    )


def allocate(
    params: Mapping[str, Tensor],
    key: BufferKey,
    layout: BufferLayout,
    policy: ShardingPolicy,
    phase: Phase,
) -> list[Bucket]:
    """Allocate the buckets of one buffer, with a slot per parameter.

    Where the buffer is sharded, the parameters move into it and become row-major.
    """
    buckets: list[Bucket] = []
    for index, bounds in enumerate(layout.buckets):
        places = [place for place in layout.params if place.bucket == index]
        device = params[places[0].name].device
        bucket = _empty_bucket(key, bounds.end - bounds.start, device, policy, phase)
        whole = bucket.params
        if whole is not None and key.shard_dtype != key.param_dtype:
            whole = torch.zeros_like(whole, dtype=key.shard_dtype)
        for place in places:
            param, start = params[place.name], place.start - bounds.start
            _fill(place.name, param, policy.init)
            if whole is None or bucket.params is None:
                slot = _plain_slot(param, place.name, start, bucket, phase)
            else:
                whole[start : start + param.numel()].view(param.shape).copy_(param.detach())
                slot = _sharded_slot(param, place.name, start, bucket, bucket.params)
                if policy.encoding is not None and key.is_encoded:
                    _have_codes(slot, bucket.params, policy.encoding)
            if bucket.release == "nothing":
                setattr(param, MAIN_GRAD, slot.main_grad)
            bucket.slots.append(slot)
            if key.reduction.is_sum or is_partial(param):
                phase.addends.watch(place.name, key.reduction.addend_scale)
        if whole is not None:
            _cut(bucket, whole, phase)
        # The first gradient allocates it again.
        if bucket.release != "nothing":
            resize(bucket.grads, 0)
        buckets.append(bucket)
    return buckets


def _empty_bucket(
    key: BufferKey, numel: int, device: torch.device, policy: ShardingPolicy, phase: Phase
) -> Bucket:
    sharded = key.param_dtype is not None
    release: Release = policy.release if sharded else "nothing"
    offload = policy.offload and sharded
    grads = torch.zeros(numel, dtype=key.grad_dtype, device=device)
    params = torch.zeros(numel, dtype=key.param_dtype, device=device) if sharded else None
    size = numel // key.reduction.num_shards
    own = slice(key.reduction.shard * size, (key.reduction.shard + 1) * size)
    own_grads, own_params = grads[own], None if params is None else params[own]
    home = torch.device("cpu") if offload else device
    pin = offload and device.type == "cuda"
    if offload or release != "nothing":
        own_grads = torch.zeros(size, dtype=key.grad_dtype, device=home, pin_memory=pin)
    if sharded and (offload or release == "all" or key.shard_dtype != key.param_dtype):
        own_params = torch.zeros(size, dtype=key.shard_dtype, device=home, pin_memory=pin)
    shards = key.reduction.shards
    # Under `full`, ranks may differ in whether a gather or a sum comes first, and collectives of
    # one group must have one order.
    gathers_over = twin_group(shards) if shards is not None and release == "all" else shards
    parts = (grads, params, own_grads, own_params)
    made = Bucket(key, *parts, release, offload, phase.addends, gathers_over=gathers_over)
    if params is not None and own_params is not None and key.is_encoded:
        is_apart = offload or release == "all"
        made.own_codes = (
            torch.zeros_like(own_params, dtype=params.dtype) if is_apart else params[own]
        )
    return made


def _fill(name: str, param: Tensor, init: Callable[[str, Tensor], None] | None) -> None:
    """Give a parameter from the meta device memory and values."""
    if not param.untyped_storage().size():
        param.data = torch.empty_like(param)
        if init is not None:
            init(name, param)


def _plain_slot(param: Tensor, name: str, start: int, bucket: Bucket, phase: Phase) -> Slot:
    # In the parameter's own order of memory, which fused optimizers rely on.
    strides = torch.empty_like(param, device="meta").stride()
    main_grad = bucket.grads.as_strided(param.shape, strides, start)
    shard = ParamShard(
        name=name, source=param, param=param, start=0, end=param.numel(), phase=phase
    )
    return Slot(name, param, main_grad, shard, bucket, start)


def _sharded_slot(param: Tensor, name: str, start: int, bucket: Bucket, params: Tensor) -> Slot:
    """Move a parameter into the flat one."""
    inside = slice(start, start + param.numel())
    if not bucket.key.is_encoded:
        param.data = params[inside].view(param.shape)
    main_grad = bucket.grads[inside].view(param.shape)
    return Slot(name, param, main_grad, None, bucket, start)


def _have_codes(slot: Slot, params: Tensor, encoding: Encoding) -> None:
    """Tell the encoding where a parameter's codes are, and make the parameter unreadable.

    A read gives NaN, and a write fails, as all elements share one place in memory.
    """
    # By `.data`, for what is written into the buffer is no new version of the view.
    encoding.place(slot.name, params[slot.inside].view(slot.param.shape).data)
    nothing = torch.full((), torch.nan, dtype=slot.param.dtype, device=slot.param.device)
    slot.param.data = nothing.expand(slot.param.shape)


def _cut(bucket: Bucket, whole: Tensor, phase: Phase) -> None:
    """Copy this rank's part of the parameters, and make shards of it."""
    params, own = bucket.params, bucket.own_params
    assert params is not None  # noqa: S101 - it is sharded
    assert own is not None  # noqa: S101
    first = bucket.reduction.shard * own.numel()
    own.copy_(whole[first : first + own.numel()])
    if whole is not params and not bucket.key.is_encoded:
        params.copy_(whole)
    for slot in bucket.slots:
        slot.shard = _shard(slot, own, bucket, phase)
    bucket.drop()


def _shard(slot: Slot, own_params: Tensor, bucket: Bucket, phase: Phase) -> ParamShard | None:
    """Make the shard of this rank's part of a parameter."""
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
    return ParamShard(
        name=slot.name,
        source=param,
        param=own,
        start=first - slot.start,
        end=last - slot.start,
        peers=bucket.reduction.peers,
        replica=bucket.reduction.replica,
        phase=phase,
    )


def _step_cost(param: Tensor) -> float:
    """Return the relative cost of orthogonalising a matrix; vectors cost their elements."""
    if param.dim() < 2:
        return float(param.numel())
    rows, columns = param.numel() // param.shape[-1], param.shape[-1]
    return float(max(rows, columns)) * min(rows, columns) ** 2
