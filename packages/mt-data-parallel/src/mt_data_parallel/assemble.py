"""Assembly of whole tensors from shards, each on one of the ranks that hold a part."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from mt_data_parallel.bucket import Bucket, Slot


def assemble_bucket(
    bucket: Bucket, group: dist.ProcessGroup, values: Mapping[str, Tensor], loads: list[int]
) -> dict[str, Tensor]:
    """Send the parts of a bucket's parameters to their owners.

    Args:
        bucket: The bucket of the parameters to assemble.
        group: Its shards.
        values: Tensors of this rank's shards of it, of the same parameters on all ranks.
        loads: Elements that each rank of the group owns so far; the bucket's are added.

    Returns:
        The whole tensors of the parameters that this rank owns.

    Raises:
        ValueError: The tensors have several dtypes.
    """
    rank, ranks = group.rank(), group.size()
    size = bucket.grads.numel() // ranks
    slots = sorted(bucket.slots, key=lambda slot: slot.start)
    owners = _owners(slots, size, loads)
    own = [slot for slot in slots if slot.name in values and slot.shard is not None]
    dtypes = {values[slot.name].dtype for slot in own}
    if len(dtypes) > 1:
        raise ValueError(f"the values have the dtypes {sorted(map(str, dtypes))}; give one at once")
    dtype = dtypes.pop() if dtypes else bucket.grads.dtype
    empty = torch.empty(0, dtype=dtype, device=bucket.grads.device)
    sent = [0] * ranks
    for slot in own:
        sent[owners[slot.name]] += _overlap(slot, rank, size)
    received = [0] * ranks
    mine = [slot for slot in own if owners[slot.name] == rank]
    for slot in mine:
        for source in range(ranks):
            received[source] += _overlap(slot, source, size)
    # By owner, and for each of them in the order of the bucket.
    going = sorted(own, key=lambda slot: owners[slot.name])
    parts = [values[slot.name].detach().reshape(-1).to(empty.device) for slot in going]
    whole = empty.new_empty(sum(received))
    dist.all_to_all_single(whole, torch.cat([empty, *parts]), received, sent, group=group)
    tensors = whole.split([slot.param.numel() for slot in mine])
    return {
        slot.name: tensor.view(slot.param.shape) for slot, tensor in zip(mine, tensors, strict=True)
    }


def _owners(slots: list[Slot], size: int, loads: list[int]) -> dict[str, int]:
    """Return the rank that gets each parameter: of those with a part, the one with least so far.

    Parameters without a choice come first, then the largest.
    """
    last = len(loads) - 1
    holders: dict[str, list[int]] = {}
    for slot in slots:
        found = [rank for rank in range(len(loads)) if _overlap(slot, rank, size)]
        holders[slot.name] = found or [min(slot.start // max(1, size), last)]
    owners: dict[str, int] = {}
    for slot in sorted(slots, key=lambda s: (len(holders[s.name]) > 1, -s.param.numel())):
        rank = min(holders[slot.name], key=lambda rank: (loads[rank], rank))
        loads[rank] += slot.param.numel()
        owners[slot.name] = rank
    return owners


def _overlap(slot: Slot, shard: int, size: int) -> int:
    """Return the number of a parameter's elements in one part of its bucket."""
    end = slot.start + slot.param.numel()
    return max(0, min(end, (shard + 1) * size) - max(slot.start, shard * size))
