"""Dtypes, places and scales of the sums, each against what the formula says."""

import pytest
import torch
import torch.distributed as dist
from mt_data_parallel import GradBuffer, Reduction
from torch import nn

SIZES = {"a": 70, "b": 300, "c": 33}
KINDS = ("replicas", "shards", "two levels")


def addends(rank, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rank)
    return {
        name: torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
        for name, size in SIZES.items()
    }


def groups(kind):
    if kind != "two levels":
        return {kind: dist.group.WORLD}
    rank = dist.get_rank()
    made = {ranks: dist.new_group(ranks) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    own = [group for ranks, group in made.items() if rank in ranks]
    return {"shards": own[0], "replicas": own[1]}


def summed(kind, options, dtype=torch.float32, whole=False, finish=1.0):
    """One backward per rank, whose gradients are `addends`; the shards' sums by name."""
    params = {name: nn.Parameter(torch.zeros(size, dtype=dtype)) for name, size in SIZES.items()}
    with GradBuffer(
        params.items(),
        group=Reduction(**groups(kind), **options),
        bucket_size=100,
        grad_dtype=dtype,
        whole=(lambda *_: True) if whole else None,
    ) as buffer:
        for _ in range(2):  # the second round shows that nothing of the first stays
            buffer.start(1)
            own = addends(dist.get_rank(), dtype)
            sum((params[name] * grad).sum() for name, grad in own.items()).backward()
            buffer.finish(scale=finish)
            buffer.gather_params()
        return {p.name: (p.start, p.grad.clone()) for p in buffer.shards()}


def assert_equal(results, expected, **tolerances):
    seen = dict.fromkeys(SIZES, 0)
    for result in results:
        for name, (start, grad) in result.items():
            wanted = expected[name][start : start + grad.numel()]
            torch.testing.assert_close(grad, wanted.to(grad.dtype), **tolerances)
            seen[name] += grad.numel()
    assert all(seen[name] >= size for name, size in SIZES.items())


def total(ranks, convert):
    return {name: sum(convert(addends(r)[name]) for r in range(ranks)) for name in SIZES}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_local_sums_round_each_addend_once_and_add_in_fp32(ranks, world_size, kind, whole):
    """Bit for bit, in the order of the ranks, for replicas and shards alike."""
    options = {"reduce_dtype": torch.bfloat16, "local_sum": True}
    expected = total(world_size, lambda grad: grad.float().bfloat16().float())
    results = ranks(world_size, summed, kind, options, torch.float32, whole)
    assert_equal(results, expected, rtol=0, atol=0)


@pytest.mark.parametrize("whole", [False, True])
def test_local_sums_in_two_levels_round_once_in_each(ranks, whole):
    options = {"reduce_dtype": torch.bfloat16, "local_sum": True}

    def rounded(grad):
        return grad.float().bfloat16().float()

    grads = [addends(rank) for rank in range(4)]
    expected = {
        name: sum(
            rounded(rounded(grads[first][name]) + rounded(grads[first + 1][name]))
            for first in (0, 2)
        )
        for name in SIZES
    }
    assert_equal(
        ranks(4, summed, "two levels", options, torch.float32, whole), expected, rtol=0, atol=0
    )


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_bf16_collective_rounds_addends_and_sum(ranks, kind):
    expected = {
        name: (addends(0)[name].float().bfloat16() + addends(1)[name].float().bfloat16()).float()
        for name in SIZES
    }
    results = ranks(2, summed, kind, {"reduce_dtype": torch.bfloat16})
    assert_equal(results, expected, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"reduce_dtype": torch.float32}, {"local_sum": True}])
def test_bf16_buffers_may_be_summed_in_fp32(ranks, options):
    """One rounding of each sum, where sums in bf16 round after every addition."""

    def rounded(grads):
        return sum(grad.float() for grad in grads).bfloat16()

    grads = [addends(rank, torch.bfloat16) for rank in range(4)]
    for kind in KINDS[:2]:
        expected = {name: rounded([grad[name] for grad in grads]) for name in SIZES}
        results = ranks(4, summed, kind, options, torch.bfloat16)
        assert_equal(results, expected, rtol=2**-7, atol=0)  # fp32 sums in another order
    expected = {
        name: rounded([rounded([grad[name] for grad in grads[i : i + 2]]) for i in (0, 2)])
        for name in SIZES
    }
    results = ranks(4, summed, "two levels", options, torch.bfloat16)
    assert_equal(results, expected, rtol=0, atol=0)


@pytest.mark.parametrize("local_sum", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_means_and_scales_in_every_kind_of_sum(ranks, kind, local_sum):
    world_size = 4
    plain = total(world_size, lambda grad: grad)
    close = {"rtol": 1e-12, "atol": 1e-12}
    for options, finish, factor in (
        ({"average": True}, 1.0, 1 / 4),
        ({"scale": 1 / 4}, 1.0, 1 / 4),
        ({}, 1 / 7, 1 / 7),
        ({"average": True, "scale": 2 / 3}, 0.5, 1 / 12),
    ):
        options = {**options, "local_sum": local_sum}
        results = ranks(world_size, summed, kind, options, torch.float64, False, finish)
        assert_equal(results, {name: grad * factor for name, grad in plain.items()}, **close)


def dense_and_expert(way):
    """Four replicas of a dense parameter; the experts are split over pairs of them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    made = {pair: dist.new_group(pair) for pair in ((0, 2), (1, 3))}
    peers = next(group for pair, group in made.items() if rank in pair)
    dense, expert, finish = {
        "scaled before": ({"scale": 1 / ranks}, {"scale": 1 / ranks}, 1.0),
        "average": ({"average": True}, {"average": True, "scale": 2 / ranks}, 1.0),
        "per token": ({}, {}, 1 / 10),
    }[way]
    params = {name: nn.Parameter(torch.zeros(3, dtype=torch.float64)) for name in ("w", "expert")}
    choice = {
        "w": Reduction(replicas=dist.group.WORLD, **dense),
        "expert": Reduction(replicas=peers, **expert),
    }
    with GradBuffer(params.items(), group=lambda name, _: choice[name]) as buffer:
        buffer.start(1)
        ((params["w"] * (rank + 1)).sum() + (params["expert"] * 10 ** (rank + 1)).sum()).backward()
        buffer.finish(scale=finish)
        return params["w"].grad[0].item(), params["expert"].grad[0].item()


@pytest.mark.parametrize("way", ["scaled before", "average", "per token"])
def test_expert_gradients_are_scaled_like_dense_ones_though_fewer_ranks_hold_them(ranks, way):
    divisor = 10 if way == "per token" else 4
    for rank, (dense, expert) in enumerate(ranks(4, dense_and_expert, way)):
        assert dense == pytest.approx((1 + 2 + 3 + 4) / divisor, rel=1e-14)
        of_peers = 10**1 + 10**3 if rank % 2 == 0 else 10**2 + 10**4
        assert expert == pytest.approx(of_peers / divisor, rel=1e-14)


def test_one_rank_averages_nothing_and_accumulates_without_scaling_twice():
    """Micro-batches are scaled once, whatever the size of the group (a known bug elsewhere)."""
    param = nn.Parameter(torch.zeros(2))
    with GradBuffer([("w", param)], group=Reduction(average=True)) as buffer:
        buffer.start(3)
        for _ in range(3):
            param.sum().backward()
        buffer.finish()
        assert param.grad.tolist() == [3.0, 3.0]
    with GradBuffer([("w", param)], group=Reduction(scale=0.5)) as buffer:
        for _ in range(2):
            buffer.start(3)
            for _ in range(3):
                param.sum().backward()
            buffer.finish()
            assert param.grad.tolist() == [1.5, 1.5]


def test_buckets_may_be_padded_for_bandwidth():
    params = [(name, nn.Parameter(torch.zeros(size))) for name, size in SIZES.items()]
    with GradBuffer(params, group=None, bucket_size=100, pad_for_bandwidth=True) as buffer:
        assert [bucket.grads.numel() for bucket in buffer.buckets] == [1 << 16] * 2


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"reduce_dtype": "bf16"}, TypeError, "reduce_dtype must be a torch.dtype or None"),
        ({"reduce_dtype": torch.int8}, ValueError, "reduce_dtype must be a floating-point dtype"),
        ({"scale": 0}, ValueError, "scale must be positive and finite, got 0"),
        ({"scale": float("nan")}, ValueError, "scale must be positive and finite"),
        ({"scale": "1"}, TypeError, "scale must be a number"),
    ],
)
def test_wrong_arguments_are_named(options, error, match):
    with pytest.raises(error, match=match):
        Reduction(**options)
