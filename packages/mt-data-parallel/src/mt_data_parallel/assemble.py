"""Assembly of whole tensors from shards, on the rank that holds the first element."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from mt_data_parallel.bucket import Bucket, Slot


def assemble_bucket(
    bucket: Bucket, group: dist.ProcessGroup, values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Send the parts of a bucket's parameters to their owners.

    Args:
        bucket: The bucket of the parameters to assemble.
        group: Its shards.
        values: Tensors of this rank's shards of it, of the same parameters on all ranks.

    Returns:
        The whole tensors of the parameters whose first element this rank has.

    Raises:
        ValueError: The tensors have several dtypes.
    """
    rank, ranks = group.rank(), group.size()
    size = bucket.grads.numel() // ranks
    slots = sorted(bucket.slots, key=lambda slot: slot.start)
    own = [slot for slot in slots if slot.name in values and slot.shard is not None]
    dtypes = {values[slot.name].dtype for slot in own}
    if len(dtypes) > 1:
        raise ValueError(f"the values have the dtypes {sorted(map(str, dtypes))}; give one at once")
    dtype = dtypes.pop() if dtypes else bucket.grads.dtype
    empty = torch.empty(0, dtype=dtype, device=bucket.grads.device)
    sent = [0] * ranks
    for slot in own:
        sent[slot.start // size] += _overlap(slot, rank, size)
    received = [0] * ranks
    mine = [slot for slot in own if slot.start // size == rank]
    for slot in mine:
        for source in range(ranks):
            received[source] += _overlap(slot, source, size)
    parts = [values[slot.name].detach().reshape(-1).to(empty.device) for slot in own]
    whole = empty.new_empty(sum(received))
    dist.all_to_all_single(whole, torch.cat([empty, *parts]), received, sent, group=group)
    tensors = whole.split([slot.param.numel() for slot in mine])
    return {
        slot.name: tensor.view(slot.param.shape) for slot, tensor in zip(mine, tensors, strict=True)
    }


def _overlap(slot: Slot, shard: int, size: int) -> int:
    """Return the number of a parameter's elements in one part of its bucket."""
    end = slot.start + slot.param.numel()
    return max(0, min(end, (shard + 1) * size) - max(slot.start, shard * size))
