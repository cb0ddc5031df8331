"""Test a ring all-reduce: its result on 4 ranks, and the error when a rank is lost in it."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from mt_testing import KillAt, RankPool, expect_kill


def ring_all_reduce(
    value: torch.Tensor, on_event: Callable[[str], None] | None = None
) -> torch.Tensor:
    """Sum over all ranks by passing every rank's value once around the ring."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total, travelling = value.clone(), value.clone()
    for _ in range(size - 1):
        received = torch.empty_like(value)
        request = dist.isend(travelling, (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        request.wait()
        if on_event is not None:
            on_event("step")
        total += received
        travelling = received
    return total


def body(on_event: Callable[[str], None] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ours and the library's result; every rank draws other values."""
    value = torch.randn(8, generator=torch.Generator().manual_seed(dist.get_rank()))
    expected = value.clone()
    dist.all_reduce(expected)
    return ring_all_reduce(value, on_event), expected


def main() -> None:
    with RankPool() as ranks:
        for ours, expected in ranks(4, body):
            torch.testing.assert_close(ours, expected)
        print("4 ranks agree with torch.distributed.all_reduce")

        death = expect_kill(ranks, 4, body, kill=KillAt("step", rank=2, nth=2))
        print(f"rank {death.rank} was lost at {death.point!r}: {death.signal_name}")

        assert len(ranks(4, body)) == 4
        print("and the pool goes on")


if __name__ == "__main__":
    main()
