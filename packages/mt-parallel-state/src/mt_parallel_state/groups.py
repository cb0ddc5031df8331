"""Makes process groups with names we choose, called by members only.

``dist.new_group(use_local_synchronization=True)`` also lets members alone create a group, but it
derives the group's name from a counter of the groups this process has made so far. Ranks that
belong to different numbers of groups then disagree on the name and wait for each other for ever.
A name that follows from the ranks is the way out, and torch offers it only in the function that
``new_group`` itself calls, so that function is called here, and nowhere else.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mt_parallel_state.options import GroupOptions

__all__ = [
    "create_group",
    "destroy_group",
    "next_state_index",
    "register_alias",
    "twin_group",
    "unregister_alias",
    "world_store",
]


def next_state_index(ranks: range, rank: int) -> int:
    """How many times ``rank`` has built a state over ``ranks`` in the current world.

    The count lives in the rendezvous store, under this rank's own key: it starts anew with every
    world, and ranks that build their states in the same order agree on it without talking.
    """
    return world_store().add(f"mt_parallel_state/states/{ranks.start}-{ranks.stop}/{rank}", 1)


def world_store() -> dist.Store:
    """The rendezvous store of the current world."""
    return c10d._world.pg_map[c10d._get_default_group()][1]


def create_group(
    ranks: tuple[int, ...],
    *,
    name: str,
    timeout: timedelta | None = None,
    options: GroupOptions | None = None,
) -> dist.ProcessGroup:
    """Makes the group of ``ranks`` (ascending, holding this rank) under ``name``.

    It has the backends of the world: under ``cpu:gloo,cuda:nccl`` one group serves tensors of both
    devices. ``options`` win over ``timeout``.
    """
    if options is not None and options.timeout is not None:
        timeout = options.timeout
    default = c10d._get_default_group()
    backend, store = c10d._world.pg_map[default]
    backend = dist.Backend(backend)
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(default.rank()),
        list(ranks),
        backend,
        store,
        cast("Any", name),  # a NewType of str in newer versions of torch
        backend_options=_nccl_options(str(backend), options),
        timeout=c10d._get_default_timeout(backend) if timeout is None else timeout,
        group_desc=name,
    )
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return cast("dist.ProcessGroup", group)  # this rank is a member


def twin_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A second group of the same ranks, in the same order, with connections of its own.

    Gloo guards the connection of two ranks by one lock for both directions. A thread that waits for
    messages spins while another one is sending; with the two directions in two groups it seldom
    has to. The twin is made once, when every member makes its first call, and found again later. It
    goes when its group is closed by its :class:`ParallelState`, or with the world.

    Returns:
        The twin. The group itself where the two must not be told apart: in check mode, which
        compares messages in their order, and where the group is not one of ``torch.distributed``.
    """
    known = c10d._world.pg_names
    if group not in known:  # a checked group is an alias, which has no name of its own
        return group
    if (twin := _twin_of(group)) is None:
        backend = c10d._world.pg_map[group][0]
        gloo = group._get_backend(torch.device("cpu")) if "gloo" in backend else None
        twin = create_group(
            tuple(dist.get_process_group_ranks(group)),
            name=_twin_name(group),
            timeout=None if gloo is None else gloo.options._timeout,
        )
    return twin


def _twin_of(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    name = _twin_name(group)
    return next((other for other, known in c10d._world.pg_names.items() if known == name), None)


def _twin_name(group: dist.ProcessGroup) -> str:
    return f"{c10d._world.pg_names[group]}-twin"


def _nccl_options(backend: str, options: GroupOptions | None) -> Any:
    return None if options is None or "nccl" not in backend else options.for_nccl()


def register_alias(alias: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    """Lets ``torch.distributed`` answer for ``alias`` what it answers for ``group``."""
    c10d._world.pg_map[alias] = c10d._world.pg_map[group]
    c10d._world.pg_group_ranks[alias] = c10d._world.pg_group_ranks[group]


def unregister_alias(alias: dist.ProcessGroup) -> None:
    """Forgets an alias; the group it stood for stays."""
    c10d._world.pg_map.pop(alias, None)
    c10d._world.pg_group_ranks.pop(alias, None)


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroys a group of :func:`create_group`, unless its world is gone already."""
    if dist.is_initialized() and group in c10d._world.pg_map:
        if (twin := _twin_of(group)) is not None:
            dist.destroy_process_group(twin)
        dist.destroy_process_group(group)
