"""Fake worlds of thousands of ranks in one process, for rank arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_MOST_RANKS = 1 << 20


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """Make this process rank `rank` of a world of `size` ranks, without communication.

    Groups can be created and asked for their ranks; collectives return at once and do not change
    their outputs. It uses torch's `fake` backend.

    Raises:
        ValueError: `rank` is not in the world.
        RuntimeError: This process already has a process group.
    """
    if not all(type(value) is int for value in (size, rank)):
        raise TypeError(f"size and rank must be ints, got {size!r} and {rank!r}")
    if not 1 <= size <= _MOST_RANKS or not 0 <= rank < size:
        raise ValueError(
            f"rank {rank} is not in a world of size {size}; give a size of 1 to {_MOST_RANKS} and "
            "0 <= rank < size"
        )
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

    if dist.is_initialized():
        raise RuntimeError(
            f"this process already has a process group of {dist.get_world_size()} ranks; "
            "call torch.distributed.destroy_process_group() before fake_world"
        )
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
