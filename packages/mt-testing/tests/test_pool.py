"""The pool: worlds, failures, deaths, hangs, reuse."""

import os

import pytest
import torch
import torch.distributed as dist
from mt_testing import RankDied, RankFailure, RankTimeout


def _sum_of_ranks():
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value)
    return value.item()


def test_results_come_by_rank(ranks):
    assert ranks(2, lambda: dist.get_rank()) == [0, 1]
    assert ranks(4, _sum_of_ranks) == [6.0] * 4


def test_failed_rank_is_named_with_its_traceback(ranks):
    def body():
        if dist.get_rank() == 1:
            raise ValueError("bad shard")
        dist.barrier()

    with pytest.raises(RankFailure, match="rank 1 of 2 raised ValueError: bad shard") as caught:
        ranks(2, body)
    assert "in body" in caught.value.tracebacks[1]


def test_dead_rank_is_named_with_its_signal(ranks):
    def body():
        if dist.get_rank() == 0:
            os.kill(os.getpid(), 9)
        dist.barrier()

    with pytest.raises(RankDied, match="rank 0 of 2 was ended by SIGKILL"):
        ranks(2, body)
    assert ranks(2, _sum_of_ranks) == [1.0, 1.0]


def test_hang_names_the_running_ranks_and_their_stacks(ranks):
    def body():
        if dist.get_rank() == 1:
            dist.recv(torch.empty(1), src=0)

    with pytest.raises(RankTimeout, match="rank 1 of 2 still running after 1 s") as caught:
        ranks(2, body, timeout=1)
    assert "in recv" in caught.value.stacks[1]
