"""A failure on one rank is an error on every rank, and none waits for the others."""

import pytest
import torch
from mt_moe import (
    Capacity,
    ExpertGroups,
    MoELayer,
    MoEOptions,
    RouterOptions,
    RoutingError,
)
from plain import drawn
from torch import distributed as dist

HIDDEN, FFN = 12, 16
DISPATCHERS = ["all_to_all", "all_gather"]
SECONDS = 20  # a hang is reported


def made(rank, *, dispatcher="auto", differs=None, tp=False, **options):
    """A layer over all ranks; rank 1's differs."""
    odd = rank == 1
    number = 12 if odd and differs == "num_experts" else 6
    hidden = 8 if odd and differs == "hidden_size" else HIDDEN
    dtype = torch.float64 if odd and differs == "dtype" else torch.float32
    world = dist.group.WORLD
    groups = {"tp": world, "tokens": world} if tp else {"experts": world}
    router = RouterOptions(losses={"aux": 0.1}, **options.pop("router", {}))
    options = MoEOptions(router=router, dispatcher=dispatcher, **options)
    layer = MoELayer(
        hidden, FFN, number, options=options, groups=ExpertGroups(**groups), dtype=dtype
    )
    return layer, drawn(2, 6, hidden, seed=rank, dtype=dtype)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("differs", ["num_experts", "hidden_size", "dtype"])
def test_layers_that_differ_between_ranks_are_named_on_all_of_them(ranks, dispatcher, differs):
    def body():
        layer, x = made(dist.get_rank(), dispatcher=dispatcher, differs=differs)
        with pytest.raises(RoutingError, match=rf"differ in {differs} \(rank 0: .*, rank 1: "):
            layer(x)

    ranks(3, body, timeout=SECONDS)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("where", ["weight", "input"])
def test_nan_on_one_rank_is_an_error_that_names_it_on_all(ranks, dispatcher, where):
    def body():
        rank = dist.get_rank()
        layer, x = made(rank, dispatcher=dispatcher)
        layer(x)
        if rank == 1:
            with torch.no_grad():
                (layer.router.weight if where == "weight" else x)[0, 0] = torch.nan
        for _ in range(2):  # and again: nothing is left half exchanged
            with pytest.raises(RoutingError, match="rank 1 of the experts' group are not finite"):
                layer(x)

    ranks(3, body, timeout=SECONDS)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dispatcher", ["local", "all_to_all"])
def test_nan_in_one_share_of_the_tokens_is_an_error_on_all_that_share_them(
    ranks, dispatcher, sequence_parallel
):
    """The experts are all on each rank; the next collective is the gather of results."""

    def body():
        rank, world = dist.get_rank(), dist.group.WORLD
        layer = MoELayer(
            *(HIDDEN, FFN, 4),
            groups=ExpertGroups(tp=world, tokens=world),
            options=MoEOptions(dispatcher=dispatcher),
            sequence_parallel=sequence_parallel,
        )
        x = drawn(1, 6, HIDDEN, dtype=torch.float32)
        x[0, 5] = torch.nan  # the last rank's when they are split
        own = x.chunk(2, 1)[rank] if sequence_parallel else x
        with pytest.raises(RoutingError, match="not finite"):
            layer(own)

    ranks(2, body, timeout=SECONDS)


def test_a_different_number_of_experts_is_named_before_counts_are_summed(ranks):
    """Balancing losses and capacity talk to the ranks that share tokens before the dispatcher."""

    def body():
        layer, x = made(dist.get_rank(), tp=True, differs="num_experts", dispatcher="local")
        with pytest.raises(RoutingError, match=r"differ in num_experts \(rank 0: 6, rank 1: 12"):
            layer(x)

    ranks(2, body, timeout=SECONDS)


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_ranks_with_different_numbers_of_tokens_keep_a_padded_capacity_apart(
    ranks, dispatcher, pad
):
    def body():
        rank, counts = dist.get_rank(), (3, 40)
        capacity = Capacity(factor=2.0, pad=pad)
        torch.manual_seed(0)
        whole = MoELayer(HIDDEN, FFN, 4, options=MoEOptions(capacity=capacity))
        torch.manual_seed(0)
        options = MoEOptions(capacity=capacity, dispatcher=dispatcher)
        groups = ExpertGroups(experts=dist.group.WORLD)
        own = MoELayer(HIDDEN, FFN, 4, options=options, groups=groups)
        x = drawn(counts[rank], HIDDEN, seed=rank, dtype=torch.float32)
        torch.testing.assert_close(own(x).hidden, whole(x).hidden, rtol=1e-5, atol=1e-6)

    ranks(2, body, timeout=SECONDS)


def test_sizes_that_ranks_cannot_share_are_errors_of_the_constructor(ranks):
    def body():
        groups = ExpertGroups(experts=dist.group.WORLD)
        with pytest.raises(ValueError, match=r"num_experts is 3, which ep=2 does not divide"):
            MoELayer(HIDDEN, FFN, 3, groups=groups)
        with pytest.raises(ValueError, match="top_k=5 is more than the 4 experts"):
            MoELayer(
                HIDDEN, FFN, 4, groups=groups, options=MoEOptions(router=RouterOptions(top_k=5))
            )
        split = ExpertGroups(experts=dist.group.WORLD, etp=2)
        with pytest.raises(ValueError, match="which etp=2 does not divide"):
            MoELayer(HIDDEN, 15, 4, groups=split)
        with pytest.raises(ValueError, match="etp=3 does not divide the 2 ranks"):
            ExpertGroups(experts=dist.group.WORLD, etp=3)
        with pytest.raises(ValueError, match="must name each of"):
            ExpertGroups(experts=dist.group.WORLD, places=((0, 0), (0, 0)))

    ranks(2, body, timeout=SECONDS)


def test_a_capacity_of_zero_is_refused():
    for factor in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="finite and above 0"):
            Capacity(factor=factor)
