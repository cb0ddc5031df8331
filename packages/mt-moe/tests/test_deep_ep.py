"""The adapter of DeepEP, against the all-to-all and a stand-in for the package."""

import sys

import elastic
import pytest
import torch
from mt_moe import ExpertGroups, MoELayer, MoEOptions, RouterOptions, RoutingError, make_dispatcher
from mt_moe.dispatch.all_to_all import AllToAllDispatcher
from mt_moe.dispatch.choice import DISPATCHERS
from mt_moe.dispatch.deep_ep import PACKAGE, DeepEPDispatcher, deep_ep_obstacle
from plain import drawn
from torch import distributed as dist

EXPERTS, HIDDEN, TOP_K = 8, 6, 3


def integers(*shape, seed, low=-4, high=5):
    """Return random integers in bf16, with exact sums."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=draw).bfloat16()


def sent(dispatcher, *, tokens, load, hidden=HIDDEN, device="cpu"):
    """Output and gradients of a dispatch, a function of each expert, and a combine."""
    rank = dist.get_rank()
    draw = torch.Generator().manual_seed(rank)
    order = torch.rand(tokens, EXPERTS, generator=draw).argsort(1)
    experts = order[:, :TOP_K]
    if load == "one_rank":
        experts = experts % 2 + torch.tensor([0, 2, 4])  # none has those of the last
    if load == "dropped":
        experts = experts.masked_fill(order[:, -TOP_K:] < 3, EXPERTS)
    x = integers(tokens, hidden, seed=rank).to(device).requires_grad_()
    weights = integers(tokens, TOP_K, seed=9 + rank, low=1).float().to(device) / 4
    weights.requires_grad_()
    out = dispatcher.dispatch(x, experts.to(device), weights, drops=load == "dropped")
    first = rank * len(out.counts)
    own = torch.arange(first, first + len(out.counts), device=device)
    own = own.repeat_interleave(out.counts)
    y = dispatcher.combine(out.rows * (own % 3 + 1).bfloat16().unsqueeze(1), out.handle)
    grads = torch.autograd.grad(y, (x, weights), integers(tokens, hidden, seed=5 + rank).to(device))
    return y, *grads, out.counts


@pytest.mark.parametrize("load", ["drawn", "one_rank", "dropped"])
@pytest.mark.parametrize("ep", [2, 4])
def test_what_is_sent_and_its_gradients_are_those_of_the_all_to_all(ranks, ep, load):
    def body():
        sys.modules[PACKAGE] = elastic
        groups = ExpertGroups(experts=dist.group.WORLD)
        tokens = 5 + dist.get_rank()
        found = sent(DeepEPDispatcher(EXPERTS, groups), tokens=tokens, load=load)
        expected = sent(AllToAllDispatcher(EXPERTS, groups), tokens=tokens, load=load)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
        (buffer,) = groups.buffers.values()
        assert buffer.room == 4 + ep  # that of the rank with most
        assert buffer.calls == ["dispatch", "combine", "dispatch again", "combine"]

    ranks(ep, body)


def test_layers_share_a_buffer_and_train_as_by_all_to_all(ranks):
    def body():
        sys.modules[PACKAGE] = elastic
        groups = ExpertGroups(experts=dist.group.WORLD)

        def made(seed):
            torch.manual_seed(seed)
            options = MoEOptions(router=RouterOptions(top_k=2, losses={"aux": 0.1}))
            return MoELayer(
                *(HIDDEN, 8, EXPERTS), options=options, groups=groups, dtype=torch.bfloat16
            )

        x = drawn(2, 5, HIDDEN, seed=dist.get_rank(), dtype=torch.bfloat16)
        results = []
        for kind in (AllToAllDispatcher, DeepEPDispatcher):
            first, second = made(1), made(2)
            for layer in (first, second):
                layer.dispatcher = kind(EXPERTS, groups)
            leaf = x.clone().requires_grad_()
            y = second(first(leaf).hidden).hidden
            y.float().square().mean().backward()
            parameters = [*first.parameters(), *second.parameters()]
            results.append([y, leaf.grad, *(p.grad for p in parameters)])
        for one, other in zip(*results, strict=True):
            error = (one - other).float().norm()
            assert error <= 2e-2 * other.float().norm()
        assert len(groups.buffers) == 1

    ranks(2, body)


def test_what_deepep_cannot_send_is_an_error_that_says_so(ranks):
    def body():
        sys.modules[PACKAGE] = elastic
        made = DeepEPDispatcher(EXPERTS, ExpertGroups(experts=dist.group.WORLD))
        experts, weights = torch.arange(8).view(4, 2), torch.ones(4, 2)
        with pytest.raises(TypeError, match=r"sends bf16, and the tokens are torch\.float32"):
            made.dispatch(torch.ones(4, HIDDEN), experts, weights)
        x = integers(4, HIDDEN, seed=0)
        made.dispatch(x, experts, weights)
        with pytest.raises(RoutingError, match=r"weights of .* are not finite"):
            made.dispatch(x, experts, weights * torch.nan)
        with pytest.raises(RoutingError, match="8 tokens, and DeepEP's buffer has room for 4"):
            made.dispatch(*(torch.cat([each, each]) for each in (x, experts, weights)))

    ranks(2, body, timeout=20)


def test_it_is_never_chosen_unasked_and_says_what_it_needs(ranks):
    assert DISPATCHERS.names[-1] == "deepep"
    with pytest.raises(ValueError, match=r"deepep.*one rank has all experts"):
        make_dispatcher("deepep", EXPERTS, ExpertGroups())

    def body():
        world = dist.group.WORLD
        assert "etp=1" in deep_ep_obstacle(EXPERTS, ExpertGroups(experts=world, etp=2))
        swapped = ExpertGroups(experts=world, places=((1, 0), (0, 0)))
        assert "in the order of the ranks" in deep_ep_obstacle(EXPERTS, swapped)
        sys.modules.pop(PACKAGE, None)
        with pytest.raises(ValueError, match="deep_ep is not installed; build it from its repo"):
            make_dispatcher("deepep", EXPERTS, ExpertGroups(experts=world))

    ranks(2, body)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices and deep_ep")
def test_on_gpus_it_sends_what_the_all_to_all_sends(ranks):
    pytest.importorskip(PACKAGE)

    def body():
        torch.cuda.set_device(dist.get_rank())
        groups = ExpertGroups(experts=dist.new_group(backend="nccl"))
        found, expected = (
            sent(kind(EXPERTS, groups), tokens=64, load="drawn", hidden=1024, device="cuda")
            for kind in (DeepEPDispatcher, AllToAllDispatcher)
        )
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)

    ranks(2, body)
