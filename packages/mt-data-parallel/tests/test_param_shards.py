import pytest
import torch
import torch.distributed as dist
from mt_data_parallel import GradBuffer, Reduction, param_shards
from torch import nn

STEPS, MICROBATCHES, ROWS = 10, 2, 3
SHARDED = [(2, "ranges"), (2, "whole"), (4, "ranges"), (4, "whole"), (4, "two levels")]


def make_net(dtype):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 24, dtype=dtype), nn.Tanh(), nn.Linear(24, 5, dtype=dtype))
    net[2].bias.requires_grad_(False)
    return net


def rows_of(step, part, dtype):
    generator = torch.Generator().manual_seed(1000 * step + part)
    return torch.randn(ROWS, 8, generator=generator, dtype=torch.float64).to(dtype)


def group_for(strategy, world_size, rank):
    if strategy == "all-reduce":
        return dist.group.WORLD
    if strategy != "two levels":
        return Reduction(shards=dist.group.WORLD)
    half = world_size // 2
    groups = {}
    for ranks in [list(range(half)), list(range(half, world_size))]:
        groups[tuple(ranks)] = dist.new_group(ranks)
    pairs = [[first, first + half] for first in range(half)]
    for ranks in pairs:
        groups[tuple(ranks)] = dist.new_group(ranks)
    own = [group for ranks, group in groups.items() if rank in ranks]
    return Reduction(shards=own[0], replicas=own[1])


def train(strategy, dtype, bucket_size, overlap, make):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    net = make_net(dtype)
    group = group_for(strategy, world_size, rank)
    with GradBuffer(
        net.named_parameters(),
        group=group,
        bucket_size=bucket_size,
        overlap=overlap,
        whole=(lambda _, p: p.dim() == 2) if strategy == "whole" else None,
    ) as buffer:
        shards = buffer.shards()
        optimizer = make([shard.param for shard in shards]) if shards else None
        for step in range(STEPS):
            buffer.start(MICROBATCHES)
            for part in range(MICROBATCHES):
                rows = rows_of(step, rank * MICROBATCHES + part, dtype)
                net(rows).square().sum().backward()
            buffer.finish()
            if optimizer is not None:
                optimizer.step()
            buffer.gather_params()
        held = sum(shard.param.numel() for shard in shards)
        return {name: p.detach().clone() for name, p in net.named_parameters()}, held


def reference(world_size, dtype, make):
    net = make_net(dtype)
    optimizer = make([p for p in net.parameters() if p.requires_grad])
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(world_size * MICROBATCHES):
            net(rows_of(step, part, dtype)).square().sum().backward()
        optimizer.step()
    return dict(net.named_parameters())


def adam(params):
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


@pytest.mark.parametrize(("world_size", "strategy"), SHARDED)
@pytest.mark.parametrize("bucket_size", [1, 100, None])
def test_sharded_steps_match_one_process_to_1e_minus_12(ranks, world_size, strategy, bucket_size):
    expected = reference(world_size, torch.float64, adam)
    results = ranks(world_size, train, strategy, torch.float64, bucket_size, True, adam)
    for params, _ in results:
        for name, param in params.items():
            torch.testing.assert_close(param, expected[name].detach(), rtol=1e-12, atol=1e-12)
    shards = 2 if strategy == "two levels" else world_size
    trained = sum(p.numel() for p in expected.values() if p.requires_grad)
    assert sum(held for _, held in results) == trained * world_size // shards


@pytest.mark.parametrize("strategy", ["ranges", "whole"])
@pytest.mark.parametrize("overlap", [True, False])
def test_sharded_steps_equal_replicated_ones_bit_for_bit_at_two_ranks(ranks, strategy, overlap):
    expected = ranks(2, train, "all-reduce", torch.float32, 100, True, adam)[0][0]
    for params, _ in ranks(2, train, strategy, torch.float32, 100, overlap, adam):
        for name, param in params.items():
            assert torch.equal(param, expected[name]), name


def whole_shapes():
    net = make_net(torch.float32)
    group = Reduction(shards=dist.group.WORLD)
    with GradBuffer(net.named_parameters(), group=group, whole=lambda _, p: p.dim() == 2) as buffer:
        return {p.name: (tuple(p.param.shape), p.is_whole) for p in buffer.shards()}


def test_whole_pieces_have_the_parameters_shape_and_one_owner(ranks):
    first, second = ranks(2, whole_shapes)
    assert {name: shape for name, (shape, _) in (first | second).items() if "weight" in name} == {
        "0.weight": (24, 8),
        "2.weight": (5, 24),
    }
    assert not {name for name in first.keys() & second.keys() if "weight" in name}
    assert all(whole for name, (_, whole) in (first | second).items() if "weight" in name)


def test_parameters_with_names_are_whole_pieces():
    net = make_net(torch.float32)
    shards = param_shards(net.named_parameters())
    assert [shard.name for shard in shards] == [name for name, _ in net.named_parameters()]
    assert all(p.is_whole and p.param is p.source and p.grad is None for p in shards)
    with pytest.raises(TypeError, match="expected a shard or a pair of name and parameter"):
        param_shards([torch.ones(2)])  # pyright: ignore[reportArgumentType]


def test_a_buffer_without_shards_steps_the_parameters_themselves():
    net = make_net(torch.float32)
    with GradBuffer(net.named_parameters(), group=None) as buffer:
        assert not buffer.is_sharded
        assert [shard.param for shard in buffer.shards()] == [
            p for p in net.parameters() if p.requires_grad
        ]


def own_groups():
    """Two parameters summed over the pair, one over nobody."""
    params = {name: nn.Parameter(torch.ones(3)) for name in ("dense", "expert", "other")}
    pair = dist.group.WORLD
    with GradBuffer(
        params.items(), group=lambda name, _: None if name == "expert" else pair
    ) as buffer:
        buffer.start(1)
        sum(param.sum() * (dist.get_rank() + 1) for param in params.values()).backward()
        buffer.finish()
        return {name: param.grad[0].item() for name, param in params.items()}


def test_groups_may_differ_by_parameter(ranks):
    assert ranks(2, own_groups) == [
        {"dense": 3.0, "expert": float(rank + 1), "other": 3.0} for rank in range(2)
    ]


def test_what_is_no_group_is_named():
    param = nn.Parameter(torch.ones(2))
    with pytest.raises(TypeError, match="group must be a ProcessGroup, a Reduction, None"):
        GradBuffer([("w", param)], group=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="group returned 3 for parameter 'w'"):
        GradBuffer([("w", param)], group=lambda *_: 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="shards must be a ProcessGroup or None"):
        Reduction(shards=3)  # pyright: ignore[reportArgumentType]


def assembled(strategy):
    """Every shard's value is its elements' numbers; who gets which parameter whole?"""
    net = make_net(torch.float32)
    group = group_for(strategy, dist.get_world_size(), dist.get_rank())
    whole = (lambda _, p: p.dim() == 2) if strategy == "whole" else None
    with GradBuffer(net.named_parameters(), group=group, bucket_size=100, whole=whole) as buffer:
        values = {
            p.name: torch.arange(p.start, p.end, dtype=torch.float64).view(p.param.shape)
            for p in buffer.shards()
        }
        return buffer.assemble(values)


@pytest.mark.parametrize(("world_size", "strategy"), SHARDED)
def test_parts_come_together_on_one_rank_each(ranks, world_size, strategy):
    results = ranks(world_size, assembled, strategy)
    shapes = {name: p.shape for name, p in make_net(torch.float32).named_parameters()}
    del shapes["2.bias"]  # frozen
    assert sorted(name for result in results for name in result) == sorted(shapes)
    for result in results:
        for name, tensor in result.items():
            expected = torch.arange(tensor.numel(), dtype=torch.float64).view(shapes[name])
            assert torch.equal(tensor, expected), name


def shared_out():
    """Assemble a large parameter between two small ones four times; how much came to this rank?"""
    sizes = {"a": 6, "large": 80, "b": 6}
    params = [(name, nn.Parameter(torch.zeros(size))) for name, size in sizes.items()]
    reduction = Reduction(shards=dist.group.WORLD)
    with GradBuffer(params, group=reduction) as buffer:
        values = {shard.name: shard.param.detach() for shard in buffer.shards()}
        loads = {}
        found = [buffer.assemble(values, loads=loads) for _ in range(4)]
    assert sum(map(sum, loads.values())) == 4 * 92
    return sum(tensor.numel() for tensors in found for tensor in tensors.values())


def test_what_several_ranks_hold_a_part_of_goes_to_the_one_with_least(ranks):
    assert ranks(2, shared_out) == [2 * 92, 2 * 92]


def test_a_value_that_is_of_no_piece_is_named():
    net = make_net(torch.float32)
    with GradBuffer(net.named_parameters(), group=None) as buffer:
        assert buffer.assemble({"0.bias": torch.ones(24)}).keys() == {"0.bias"}
        with pytest.raises(ValueError, match=r"3 elements for '0.weight', of which .* has 192"):
            buffer.assemble({"0.weight": torch.ones(3)})
        with pytest.raises(ValueError, match=r"3 elements for '2.bias', of which this rank has 0"):
            buffer.assemble({"2.bias": torch.ones(3)})
