"""Placement by a rank's own place."""

from __future__ import annotations

import pytest
from mt_parallel_state import ParallelLayout, ParallelState
from mt_pipeline import own_layers, split_layers
from mt_testing import fake_world


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_owns_the_layers_of_its_stage(rank: int) -> None:
    with fake_world(4, rank=rank):
        state = ParallelState(ParallelLayout(pp=2, dp=2), device="cpu")
        assert own_layers(5, state) == split_layers(5, 2)[rank // 2]
