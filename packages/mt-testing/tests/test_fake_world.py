import pytest
import torch
import torch.distributed as dist
from mt_testing import fake_world


def test_fake_world_of_16384_ranks_makes_groups():
    with fake_world(16384, rank=12345):
        assert dist.get_world_size() == 16384
        assert dist.get_rank() == 12345
        group = dist.new_group(list(range(12344, 12352)))
        assert dist.get_rank(group) == 1
        assert dist.get_world_size(group) == 8
        dist.all_reduce(torch.ones(2), group=group)
    assert not dist.is_initialized()


def test_fake_world_ends_after_an_error():
    with pytest.raises(RuntimeError, match="inside"), fake_world(8):
        raise RuntimeError("inside")
    assert not dist.is_initialized()


def test_fake_world_refuses_a_rank_outside_and_a_second_world():
    with pytest.raises(ValueError, match="rank 8 is not in a world of size 8"), fake_world(8, 8):
        pass
    with fake_world(8), pytest.raises(RuntimeError, match="a process group of 8"), fake_world(4):
        pass


@pytest.mark.parametrize("size", [0, -1, 10**12])
def test_fake_world_refuses_absurd_sizes_at_once(size):
    with pytest.raises(ValueError, match="give a size of 1 to 1048576"), fake_world(size):
        pass
    with pytest.raises(TypeError, match="must be ints"), fake_world("8"):
        pass
