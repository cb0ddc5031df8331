"""Small values that every rank of a group gets from every rank."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from mt_parallel_state.collectives import Group


def agreement_device(group: Group, device: torch.device | str) -> torch.device:
    """Return where the ranks of a group agree on numbers that their hosts have.

    A group with a backend for the CPU (`cpu:gloo,cuda:nccl`) shares them there, so that no host
    waits for what its device still computes.

    Args:
        group: The ranks; None is one rank.
        device: Where a group without such a backend takes tensors from.
    """
    here = torch.device("cpu")
    try:  # torch knows the configuration of its own groups only, and not of one that checks another
        _ = None if group is None else group._get_backend(here)
    except RuntimeError:
        return torch.device(device)
    return here


def share_json(value: Any, group: Group, *, device: torch.device | str = "cpu") -> list[Any]:
    """Give every rank the values of all; every rank of the group calls it.

    Values travel as JSON text: `all_gather_object` unpickles what it gets. It costs one all-reduce,
    and one all-gather unless all values are None.

    Args:
        value: What JSON can hold; a tuple arrives as a list.
        group: The ranks; None is one rank.
        device: Where a group without a backend for the CPU takes tensors from.

    Returns:
        The values by rank in the group.

    Raises:
        TypeError: The value is none that JSON has.
    """
    text = b"" if value is None else json.dumps(value).encode()
    if group is None:
        return [json.loads(text) if text else None]
    device = agreement_device(group, device)
    longest = torch.tensor([len(text)], device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
    ranks = dist.get_world_size(group)
    if not int(longest):
        return [None] * ranks
    padded = bytearray(text.ljust(int(longest)))  # JSON takes spaces at its end
    own = torch.frombuffer(padded, dtype=torch.uint8).to(device)
    found = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(found, own, group=group)
    texts = [one.cpu().numpy().tobytes().strip() for one in found]
    return [json.loads(text) if text else None for text in texts]
