import copy
import gc

import pytest
import torch
import torch.distributed as dist
from mt_data_parallel import Reduction, shard
from mt_parallel_state import (
    CheckMode,
    ParallelLayout,
    ParallelState,
    PartitionSpec,
    shard_param,
    sharding_of,
)
from mt_testing import sample
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS, MICROBATCHES, ROWS, WIDTH = 10, 2, 3, 16
STRATEGIES = ("none", "optimizer", "optimizer_gradients", "full")


class Net(nn.Module):
    """Layers, a matrix used at both ends, and one recomputed layer."""

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
    how = dict(how)
    hybrid, recompute, meta = (how.pop(key, False) for key in ("hybrid", "recompute", "meta"))
    net = Net(device="meta") if meta else make_net(recompute)
    net.recompute = recompute
    init = fill if meta else None
    how["bucket_size"] = 100
    with shard(net, strategy, group=group_of(hybrid), init=init, **how) as buffer:
        pieces = buffer.shards()
        params = [p.param for p in pieces] or [torch.zeros(0)]  # where padding has all of a rank's
        optimizer = torch.optim.AdamW(params, lr=1e-2, fused=True)
        for step in range(STEPS):
            buffer.start(MICROBATCHES)
            for part in range(MICROBATCHES):
                net(tokens_of(step, dist.get_rank() * MICROBATCHES + part)).backward()
            buffer.finish()
            optimizer.step()
            buffer.gather_params()
        with torch.no_grad():
            loss = net(tokens_of(99, 0)).item()  # right after the step
        buffer.gather_params()
        with buffer.gathered():
            params = {name: p.detach().clone() for name, p in net.named_parameters()}
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


OPTIONS = [
    (2, {}),
    (4, {}),
    (4, {"hybrid": True}),
    (2, {"recompute": True}),
    (2, {"meta": True}),
    (2, {"prefetch": 0}),
    (2, {"prefetch": 2, "recompute": True}),
    (2, {"overlap": False, "pad_for_bandwidth": True}),
    (2, {"offload": True}),
    (4, {"offload": True, "hybrid": True, "meta": True}),
    (1, {"offload": True}),
]


@pytest.mark.parametrize(
    ("strategy", "world_size", "options"),
    sample(((strategy, *each) for strategy in STRATEGIES for each in OPTIONS), every=3),
)
def test_every_strategy_matches_one_process_to_1e_minus_12(ranks, strategy, world_size, options):
    if strategy == "none":  # a group of replicas needs no second level, and memory at once
        kept = ("recompute", "overlap", "pad_for_bandwidth")
        options = {key: value for key, value in options.items() if key in kept}
    expected, loss = reference(world_size)
    for params, found in ranks(world_size, train, strategy, options):
        assert found == pytest.approx(loss, rel=1e-12)
        for name, param in params.items():
            torch.testing.assert_close(param, expected[name].detach(), rtol=1e-12, atol=1e-12)


MIXED = [
    {"shard_dtype": torch.float32},
    {"shard_dtype": torch.float32, "meta": True},
    {"shard_dtype": torch.float32, "offload": True, "prefetch": 0},
]


def train_mixed(strategy, how):
    """A bf16 model with shards of fp32 masters and Adam steps; return the computed weights."""
    how = dict(how)
    net = Net(torch.bfloat16, device="meta" if how.pop("meta", False) else None)
    if not net.embedding.weight.is_meta:
        for name, param in net.named_parameters():
            fill(name, param)
    with shard(net, strategy, group=dist.group.WORLD, init=fill, **how) as buffer:
        params = [piece.param for piece in buffer.shards()]
        assert {p.dtype for p in params} == {torch.float32}
        optimizer = torch.optim.AdamW(params, lr=1e-2)
        for step in range(STEPS):
            buffer.start(MICROBATCHES)
            for part in range(MICROBATCHES):
                net(tokens_of(step, dist.get_rank() * MICROBATCHES + part)).backward()
            buffer.finish()
            optimizer.step()
            buffer.gather_params()
        with buffer.gathered():
            return {name: p.detach().clone() for name, p in net.named_parameters()}


def mixed_reference(world_size):
    """By hand: bf16 gradients added in fp32, steps of fp32 masters, bf16 copies of them."""
    net = Net(torch.bfloat16)
    for name, param in net.named_parameters():
        fill(name, param)
    masters = {name: nn.Parameter(p.detach().float()) for name, p in net.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2)
    for step in range(STEPS):
        for master in masters.values():
            master.grad = torch.zeros_like(master)
        for rank in range(world_size):
            own = {name: torch.zeros_like(master) for name, master in masters.items()}
            for part in range(MICROBATCHES):
                net.zero_grad()
                net(tokens_of(step, rank * MICROBATCHES + part)).backward()
                for name, param in net.named_parameters():
                    own[name] += param.grad.float()
            for name, master in masters.items():
                master.grad += own[name]
        optimizer.step()
        with torch.no_grad():
            for name, param in net.named_parameters():
                param.copy_(masters[name])
    return dict(net.named_parameters())


@pytest.mark.parametrize("how", MIXED, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_bf16_parameters_gathered_from_fp32_shards_equal_masters_by_hand(ranks, strategy, how):
    expected = mixed_reference(2)
    for params in ranks(2, train_mixed, strategy, how):
        for name, param in params.items():
            assert param.dtype == torch.bfloat16
            if strategy == "optimizer":  # the order of additions is that of the reference
                assert torch.equal(param, expected[name].detach()), name
            torch.testing.assert_close(param, expected[name].detach(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_fp32_model_computes_in_bf16_and_steps_in_fp32(ranks, world_size):
    def body():
        net = Net(torch.float32)
        for name, param in net.named_parameters():
            fill(name, param)
        whole = {name: p.detach().clone() for name, p in net.named_parameters()}
        with shard(net, "full", group=dist.group.WORLD, param_dtype=torch.bfloat16) as buffer:
            for piece in buffer.shards():
                values = whole[piece.name].view(-1)[piece.start : piece.end]
                assert torch.equal(piece.param.detach().view(-1), values)  # not rounded
            buffer.start(1)
            net(tokens_of(0, 0)).backward()
            buffer.finish()
            assert all(piece.grad.dtype == torch.float32 for piece in buffer.shards())
            with buffer.gathered():
                return all(
                    torch.equal(param, whole[name].bfloat16())
                    for name, param in net.named_parameters()
                )

    assert ranks(world_size, body) == [True] * world_size


def on_their_way():
    """Which parameters are still coming, seen in forwards and by others, after a step."""
    net = make_net()
    seen = {}

    def coming():
        return sum(bucket.is_coming for bucket in buffer.buckets)

    def note(name):
        seen[name] = coming()

    with shard(net, "optimizer", group=dist.group.WORLD, bucket_size=1) as buffer:
        for number, layer in enumerate(net.layers):
            layer.register_forward_hook(lambda *_, name=f"layer {number}": note(name))
        net.embedding.register_forward_hook(lambda *_: note("embedding"))
        buffer.gather_params()
        seen["after the step"] = coming()
        net(tokens_of(0, 0))
        for name, reader in {
            "state_dict": net.state_dict,
            "state_dict of a layer": net.layers[0].state_dict,
            "wait_params": buffer.wait_params,
        }.items():
            buffer.gather_params()
            reader()
            seen[name] = coming()
        buffer.gather_params()
        with buffer.gathered():
            seen["gathered"] = coming()
        buffer.gather_params()
        buffer.gather_params()  # pieces may have changed again
        seen["twice"] = coming()
        buffer.wait_params()
    return buffer.num_buckets, seen


def test_a_forward_waits_for_the_parameters_it_needs_and_readers_for_all(ranks):
    for _, seen in ranks(2, on_their_way):
        assert seen == {
            "after the step": 13,
            "embedding": 12,
            "layer 0": 8,
            "layer 1": 4,
            "layer 2": 0,
            "state_dict": 0,
            "state_dict of a layer": 0,
            "wait_params": 0,
            "gathered": 0,
            "twice": 13,
        }


def stepped(strategy, how):
    net = make_net()
    with shard(net, strategy, group=dist.group.WORLD, bucket_size=100, **how) as buffer:
        optimizer = torch.optim.SGD([p.param for p in buffer.shards()], lr=0.1)
        for step in range(4):
            buffer.start(1)
            net(tokens_of(step, dist.get_rank())).backward()
            buffer.finish()
            optimizer.step()
            buffer.gather_params()
        with buffer.gathered():
            return {name: p.detach().clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_prefetching_and_overlap_change_no_bit(ranks, strategy):
    first = ranks(2, stepped, strategy, {"prefetch": 0, "overlap": False})[0]
    for how in ({"prefetch": 1}, {"prefetch": 3}, {"prefetch": 1, "overlap": False}):
        for params in ranks(2, stepped, strategy, how):
            assert all(torch.equal(param, first[name]) for name, param in params.items())


def alive():
    """Bytes of the fp64 tensors that exist."""
    storages = (
        tensor.untyped_storage()
        for tensor in gc.get_objects()
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.dtype == torch.float64
    )
    return sum({storage._cdata: storage.size() for storage in storages}.values())


def starting(offload):
    """The bytes alive at most while a model on the meta device gets its values, and its own."""
    net = nn.ModuleList(nn.Linear(64, 64, device="meta", dtype=torch.float64) for _ in range(16))
    most = []

    def watched(name, param):
        fill(name, param)
        most.append(alive())

    before = alive()
    with shard(
        nn.Sequential(net), "full", group=dist.group.WORLD, init=watched, offload=offload
    ) as buffer:
        shares = sum(2 * piece.param.nbytes for piece in buffer.shards())  # with gradients
    return max(most) - before, shares, sum(p.numel() * 8 for p in net.parameters())


@pytest.mark.parametrize("offload", [False, True])
def test_no_rank_has_the_whole_model_while_it_starts(ranks, offload):
    for most, shares, whole in ranks(4, starting, offload):
        unit = whole // 16
        assert shares < 0.55 * whole  # with padding
        # A unit and its gradients, one parameter that is filled, and what is padded.
        assert most < shares + 3.2 * unit < 0.75 * whole


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


def checked_step(strategy):
    """One step whose calls are all compared between the ranks."""
    with ParallelState(ParallelLayout(dp=2), check=CheckMode(timeout=20)) as state:
        net = make_net()
        with shard(net, strategy, group=state.group("dp")) as buffer:
            for step in range(2):
                buffer.start(1)
                net(tokens_of(step, state.rank)).backward()
                buffer.finish()
                buffer.gather_params()
            return {piece.name: (piece.start, piece.grad.clone()) for piece in buffer.shards()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_check_mode_takes_every_strategy(ranks, strategy):
    net = make_net()
    for part in range(2):
        net(tokens_of(1, part)).backward()
    for grads in ranks(2, checked_step, strategy):
        for name, (start, grad) in grads.items():
            whole = net.get_parameter(name).grad.view(-1)[start : start + grad.numel()]
            torch.testing.assert_close(grad.reshape(-1), whole, rtol=1e-12, atol=1e-12)
