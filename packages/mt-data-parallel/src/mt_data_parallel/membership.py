"""The parameters of a GradBuffer, and the flat buffer of each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from mt_parallel_state import agreement_device, sharding_of
from torch import Tensor, nn

from mt_data_parallel.bucket import Bucket, BufferKey
from mt_data_parallel.grad import MAIN_GRAD
from mt_data_parallel.policy import ShardingPolicy
from mt_data_parallel.reduction import GroupChoice, reduction_of


def compare(buckets: list[Bucket], group: dist.ProcessGroup) -> None:
    """Raise ValueError where another rank of the group has another layout."""
    own = repr([(slot.name, slot.param.shape) for bucket in buckets for slot in bucket.slots])
    own += repr([(bucket.grads.numel(), bucket.grads.dtype) for bucket in buckets])
    digest = int.from_bytes(hashlib.sha256(own.encode()).digest()[:7])
    device = agreement_device(group, buckets[0].grads.device)
    found = torch.zeros(group.size(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(found, torch.tensor([digest], device=device), group=group)
    others = [rank for rank, other in enumerate(found.tolist()) if other != digest]
    if others:
        raise ValueError(
            f"ranks {others} of the group have other parameters than this one (names, order, "
            "shapes, dtypes) or another bucket_size; give every rank the same"
        )


def keys_of(
    params: Mapping[str, Tensor],
    group: GroupChoice,
    grad_dtype: torch.dtype | None,
    whole: Callable[[str, Tensor], bool] | None,
    policy: ShardingPolicy,
) -> dict[str, BufferKey]:
    """Return the flat buffer that each parameter belongs to."""
    keys: dict[str, BufferKey] = {}
    for name, param in params.items():
        reduction = reduction_of(group, name, param)
        encoded = policy.encoding is not None and policy.encoding.encodes(name, param)
        sharded = reduction.shards is not None or policy.is_apart or encoded
        param_dtype = policy.param_dtype or param.dtype
        shard_dtype = policy.shard_dtype or param.dtype
        if encoded:
            param_dtype, shard_dtype = torch.uint8, _full_dtype(param.dtype)
        keys[name] = BufferKey(
            grad_dtype=grad_dtype or _full_dtype(param.dtype),
            param_dtype=param_dtype if sharded else None,
            shard_dtype=shard_dtype if sharded else None,
            reduction=reduction,
            whole=sharded and whole is not None and bool(whole(name, param)),
            unit=None if policy.unit_of is None else policy.unit_of(name),
            is_encoded=encoded,
        )
    return keys


def is_shared(param: Tensor) -> bool:
    """Return whether another pipeline stage holds a copy of the parameter."""
    if not isinstance(param, nn.Parameter):
        return False
    return not {"embedding", "pp"}.isdisjoint(sharding_of(param).partial_grad)


def _full_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def checked(named_params: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the trainable, non-empty parameters by name; refuse those that cannot be buffered."""
    params: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    for name, param in named_params:
        if not isinstance(param, Tensor):
            raise TypeError(
                f"expected pairs of name and parameter, got {param!r:.60} for {name!r:.60}; pass "
                "module.named_parameters()"
            )
        if not param.requires_grad or not param.numel():
            continue
        if param.is_complex():
            raise TypeError(
                f"parameter {name!r} is complex, and gradients are summed as real numbers; "
                "train torch.view_as_real of it"
            )
        if name in params:
            raise ValueError(f"parameter {name!r} is listed twice; names must be unique")
        if id(param) in names:
            raise ValueError(
                f"parameter {name!r} is listed twice, also as {names[id(param)]!r}; list a shared "
                "parameter once, as module.named_parameters() does"
            )
        if hasattr(param, MAIN_GRAD):
            raise ValueError(
                f"parameter {name!r} already belongs to a GradBuffer; close() that one first"
            )
        params[name] = param
        names[id(param)] = name
    devices = {param.device for param in params.values()}
    if len(devices) > 1:
        raise ValueError(
            f"parameters lie on {sorted(map(str, devices))}; a GradBuffer holds one device, make "
            "one buffer for each"
        )
    return params
