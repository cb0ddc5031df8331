"""Makes process groups with names we choose, called by members only.

`dist.new_group(use_local_synchronization=True)` also lets members alone create a group, but it
derives the group's name from a counter of the groups this process has made so far. Ranks that
belong to different numbers of groups then disagree on the name and wait for each other for ever.
A name that follows from the ranks is the way out, and torch offers it only in the function that
`new_group` itself calls, so that function is called here, and nowhere else.

Nor may a group be split off the world's communicator, as torch does where the world is bound to a
device: NCCL wants every rank of the world to take part in a split, so the ranks outside the group
would hang, or be wired to the next one. The world is unbound while a group is made, and NCCL
connects its members alone, at their first collective where torch can wait until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from mt_files import check_type
from torch.distributed import distributed_c10d as c10d

from mt_parallel_state.options import GroupOptions

_TWIN = "~"


def next_state_index(ranks: range, rank: int) -> int:
    """Count how many times `rank` has built a state over `ranks` in the current world.

    The count lives in the rendezvous store, under this rank's own key: it starts anew with every
    world, and ranks that build their states in the same order agree on it without talking.
    """
    return world_store().add(f"mt_parallel_state/states/{ranks.start}-{ranks.stop}/{rank}", 1)


def world_store() -> dist.Store:
    """Return the rendezvous store of the current world."""
    return c10d._world.pg_map[c10d._get_default_group()][1]


def create_group(
    ranks: tuple[int, ...],
    *,
    name: str,
    timeout: timedelta | None = None,
    options: GroupOptions | None = None,
) -> dist.ProcessGroup:
    """Make the group of `ranks` (ascending, holding this rank) under `name`.

    It has the backends of the world: under `cpu:gloo,cuda:nccl` one group serves tensors of both
    devices. `options` win over `timeout`.
    """
    if options is not None and options.timeout is not None:
        timeout = options.timeout
    default = c10d._get_default_group()
    backend, store = c10d._world.pg_map[default]
    backend = dist.Backend(backend)
    timeout = c10d._get_default_timeout(backend) if timeout is None else timeout
    nccl = nccl_options(options, timeout) if "nccl" in str(backend) else None
    with _not_split_from(default) as device:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(default.rank()),
            list(ranks),
            backend,
            store,
            cast("Any", name),  # a NewType of str in newer versions of torch
            backend_options=nccl,
            timeout=timeout,
            # What connects lazily has to be told its device; the others would connect at once.
            device_id=device if getattr(nccl, "lazy_init", False) else None,
            group_desc=name,
        )
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return cast("dist.ProcessGroup", group)  # this rank is a member


def nccl_options(options: GroupOptions | None, timeout: timedelta | None) -> Any:
    """Return `ProcessGroupNCCL.Options` that connect lazily, where torch has a choice."""
    made = (options or GroupOptions()).for_nccl()
    if timeout is not None:
        made._timeout = timeout
    if hasattr(made, "lazy_init"):
        made.lazy_init = True
    return made


@contextmanager
def _not_split_from(default: dist.ProcessGroup) -> Iterator[torch.device | None]:
    """Hide and yield the world's bound device: torch would split a bound communicator."""
    device = default.bound_device_id
    if device is None:
        yield None
        return
    default.bound_device_id = None
    try:
        yield device
    finally:
        default.bound_device_id = device


def twin_group(
    group: dist.ProcessGroup, purpose: str = "twin", *, timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """Return a second group of the same ranks, in the same order, with connections of its own.

    Gloo guards the connection of two ranks by one lock for both directions. A thread that waits for
    messages spins while another one is sending; with the two directions in two groups it seldom
    has to. The twin is made once, when every member makes its first call, and found again later. It
    goes when its group is closed by its `ParallelState`, or with the world.

    Args:
        group: The group.
        purpose: Name of the twin; another name is another group.
        timeout: Timeout of its collectives; None is the group's.

    Returns:
        The twin. The group itself where the two must not be told apart: in check mode, which
        compares messages in their order, and where the group is not one of `torch.distributed`.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup, got {group!r}")
    check_type("purpose", purpose, str)
    if timeout is not None:
        check_type("timeout", timeout, timedelta)
    known = c10d._world.pg_names
    if group not in known:  # a checked group is an alias, which has no name of its own
        return group
    name = f"{known[group]}{_TWIN}{purpose}"
    found = next((twin for twin in _twins_of(group) if known[twin] == name), None)
    if found is not None:
        return found
    backend = c10d._world.pg_map[group][0]
    if timeout is None and "gloo" in backend:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    members = tuple(dist.get_process_group_ranks(group))
    return create_group(members, name=name, timeout=timeout)


def _twins_of(group: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    known = c10d._world.pg_names
    return [twin for twin, name in known.items() if name.startswith(f"{known[group]}{_TWIN}")]


def register_alias(alias: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    """Let `torch.distributed` answer for `alias` what it answers for `group`."""
    c10d._world.pg_map[alias] = c10d._world.pg_map[group]
    c10d._world.pg_group_ranks[alias] = c10d._world.pg_group_ranks[group]


def unregister_alias(alias: dist.ProcessGroup) -> None:
    """Forget an alias; the group it stood for stays."""
    c10d._world.pg_map.pop(alias, None)
    c10d._world.pg_group_ranks.pop(alias, None)


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy a group of `create_group`, unless its world is gone already."""
    if dist.is_initialized() and group in c10d._world.pg_map:
        for twin in _twins_of(group):
            dist.destroy_process_group(twin)
        dist.destroy_process_group(group)
