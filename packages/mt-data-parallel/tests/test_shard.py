import copy

import pytest
import torch
import torch.distributed as dist
from mt_data_parallel import Reduction, shard
from mt_parallel_state import PartitionSpec, shard_param, sharding_of
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS, MICROBATCHES, ROWS, WIDTH = 10, 2, 3, 16
STRATEGIES = ("none", "optimizer", "optimizer_gradients", "full")


class Net(nn.Module):
    """Layers, a matrix that is used at both ends, and one layer that is recomputed."""

    def __init__(self, dtype=torch.float64, device=None, recompute=False):
        super().__init__()
        kwargs = {"dtype": dtype, "device": device}
        self.embedding = nn.Embedding(11, WIDTH, **kwargs)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH, **kwargs), nn.Linear(WIDTH, WIDTH, **kwargs))
            for _ in range(3)
        )
        self.recompute = recompute

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            y = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
            x = x + torch.tanh(y)
        return (x @ self.embedding.weight.T).logsumexp(-1).sum()


def fill(name, param):
    with torch.no_grad():
        seed = sum(map(ord, name))
        generator = torch.Generator().manual_seed(seed)
        param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) / 4)


def make_net(recompute=False):
    net = Net(recompute=recompute)
    for name, param in net.named_parameters():
        fill(name, param)
    return net


def tokens_of(step, part):
    generator = torch.Generator().manual_seed(1000 * step + part)
    return torch.randint(11, (ROWS, 5), generator=generator)


def group_of(hybrid):
    if not hybrid:
        return dist.group.WORLD
    rank = dist.get_rank()
    groups = {ranks: dist.new_group(ranks) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    own = [group for ranks, group in groups.items() if rank in ranks]
    return Reduction(shards=own[0], replicas=own[1])


def train(strategy, how):
    hybrid, recompute, meta = (how.get(key, False) for key in ("hybrid", "recompute", "meta"))
    net = Net(device="meta") if meta else make_net(recompute)
    net.recompute = recompute
    init = fill if meta else None
    options = {} if strategy in ("optimizer_gradients", "full") else {"bucket_size": 100}
    with shard(net, strategy, group=group_of(hybrid), init=init, **options) as buffer:
        pieces = buffer.pieces()
        optimizer = torch.optim.AdamW([p.param for p in pieces], lr=1e-2, fused=True)
        for step in range(STEPS):
            buffer.start(MICROBATCHES)
            for part in range(MICROBATCHES):
                net(tokens_of(step, dist.get_rank() * MICROBATCHES + part)).backward()
            buffer.finish()
            optimizer.step()
            buffer.gather_params()
        with buffer.gathered():
            params = {name: p.detach().clone() for name, p in net.named_parameters()}
        with torch.no_grad():
            loss = net(tokens_of(99, 0)).item()
    return params, loss


def reference(world_size):
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(world_size * MICROBATCHES):
            net(tokens_of(step, part)).backward()
        optimizer.step()
    return dict(net.named_parameters()), net(tokens_of(99, 0)).item()


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(2, {}), (4, {}), (4, {"hybrid": True}), (2, {"recompute": True}), (2, {"meta": True})],
    ids=str,
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_matches_one_process_to_1e_minus_12(ranks, strategy, world_size, options):
    if strategy == "none":  # a group of replicas needs no second level, and memory at once
        options = {key: value for key, value in options.items() if key == "recompute"}
    expected, loss = reference(world_size)
    for params, found in ranks(world_size, train, strategy, options):
        assert found == pytest.approx(loss, rel=1e-12)
        for name, param in params.items():
            torch.testing.assert_close(param, expected[name].detach(), rtol=1e-12, atol=1e-12)


def resident():
    """Bytes of whole parameters and gradients after a step, in a forward and at its peak."""
    net = make_net()
    seen = []

    def count():
        return sum(1 for bucket in buffer._buckets if bucket.is_here)

    with shard(net, "full", group=dist.group.WORLD) as buffer:
        for layer in net.layers:
            layer.register_forward_hook(lambda *_: seen.append(count()))
        before = count()
        buffer.start(1)
        net(tokens_of(0, 0)).backward()
        buffer.finish()
        buffer.gather_params()
        grads = [bucket.grads.untyped_storage().size() for bucket in buffer._buckets]
        return before, seen, count(), sum(grads), buffer.num_buckets


def test_full_sharding_holds_the_root_and_two_units_at_most(ranks):
    for before, seen, after, grads, buckets in ranks(2, resident):
        assert buckets == 4
        assert before == after == grads == 0
        assert max(seen) <= 3


def test_parameters_keep_their_identity_and_their_records(ranks):
    def body():
        net = make_net()
        record = shard_param(net.layers[0][1].weight, PartitionSpec("tp"))
        before = dict(net.named_parameters())
        with shard(net, "full", group=dist.group.WORLD):
            after = dict(net.named_parameters())
            return all(after[name] is param for name, param in before.items()), (
                sharding_of(net.layers[0][1].weight).spec == sharding_of(record).spec
            )

    assert ranks(2, body) == [(True, True)] * 2


def test_a_record_on_the_meta_device_reaches_the_parameter_that_takes_its_place():
    net = Net(device="meta")
    shard_param(net.embedding.weight, PartitionSpec("tp"))
    with shard(net, "none", group=None, init=fill):
        assert sharding_of(net.embedding.weight).spec == PartitionSpec("tp")
        assert torch.equal(net.embedding.weight, make_net().embedding.weight)


def test_one_rank_shares_nothing_out():
    net = make_net()
    other = copy.deepcopy(net)
    with shard(net, "full", group=None) as buffer:
        assert not buffer.is_sharded
        buffer.start(1)
        net(tokens_of(0, 0)).backward()
        buffer.finish()
        other(tokens_of(0, 0)).backward()
        for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"strategy must be one of none, optimizer, .* got 'zero'"):
        shard(make_net(), "zero", group=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="parameter 'weight' is on the meta device"):
        shard(Net(device="meta"), "full", group=None)
    with pytest.raises(TypeError, match="model must be a Module"):
        shard(3, "full", group=None)  # pyright: ignore[reportArgumentType]
