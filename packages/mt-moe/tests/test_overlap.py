"""Work while tokens travel: the order of events, the same bits, and a layer in its parts."""

import pytest
import torch
from mt_moe import ExpertGroups, MoELayer, MoEOptions, RouterOptions
from mt_parallel_state import Pending
from plain import F64, drawn
from torch import distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten


def made(dispatcher, *, shared=6):
    torch.manual_seed(0)
    router = RouterOptions(top_k=2, dtype=F64)
    options = MoEOptions(router=router, shared_size=shared, dispatcher=dispatcher)
    groups = ExpertGroups(experts=dist.group.WORLD)
    return MoELayer(8, 12, 4, options=options, groups=groups, dtype=F64)


def order_of_events(monkeypatch, dispatcher):
    """What begins, is computed and is waited for, in the layer's first exchange of tokens."""
    layer, events = made(dispatcher), []
    layer(drawn(5, 8))  # ranks compare their settings once
    wait = Pending.wait
    kinds = ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor")
    real = {kind: getattr(dist, kind) for kind in kinds}

    def begin(kind):
        def run(out, x, *args, **options):
            if options.get("async_op") and out.shape[-1:] == (8,):
                events.append("start")
            return real[kind](out, x, *args, **options)

        return run

    def waited(self):
        result = wait(self)
        if result.shape[-1:] == (8,):
            events.append("wait")
        return result

    for kind in kinds:
        monkeypatch.setattr(dist, kind, begin(kind))
    monkeypatch.setattr(Pending, "wait", waited)
    layer.shared.register_forward_hook(lambda *_: events.append("shared"))
    layer.shared.down.weight.register_hook(lambda _: events.append("shared's gradient"))
    out = layer(drawn(5, 8).requires_grad_()).hidden
    forward = events.copy()
    events.clear()
    out.sum().backward()
    return forward, events


def check_order(dispatcher):
    with pytest.MonkeyPatch.context() as patch:
        forward, backward = order_of_events(patch, dispatcher)
    assert forward == ["start", "shared", "wait", "start", "wait"]  # the last two: combine
    assert backward == ["start", "wait", "start", "shared's gradient", "wait"]


def check_bits(dispatcher):
    overlapped, apart = made(dispatcher), made(dispatcher)
    shared, apart.shared = apart.shared, None
    x = drawn(1, 5, 8, seed=dist.get_rank())
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = overlapped(found).hidden, apart(expected).hidden
    z = z + shared(expected)
    grad = drawn(1, 5, 8, seed=9)
    y.backward(grad)
    z.backward(grad)
    assert torch.equal(y, z)
    assert torch.equal(found.grad, expected.grad)
    wanted = dict(apart.named_parameters()) | {
        f"shared.{name}": param for name, param in shared.named_parameters()
    }
    for name, param in overlapped.named_parameters():
        assert torch.equal(param.grad, wanted[name].grad), name


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
def test_the_shared_expert_is_between_start_and_wait_both_ways(ranks, dispatcher):
    ranks(2, check_order, dispatcher)


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
def test_the_bits_are_those_of_a_shared_expert_after_the_others(ranks, dispatcher):
    ranks(2, check_bits, dispatcher)


def cut(state):
    """The state with leaves of a new graph, and what gives their gradients to the old one."""
    tensors, spec = tree_flatten(state)
    learn = [i for i, t in enumerate(tensors) if isinstance(t, torch.Tensor) and t.requires_grad]
    old = [tensors[i] for i in learn]
    new = [t.detach().requires_grad_() for t in old]
    for i, leaf in zip(learn, new, strict=True):
        tensors[i] = leaf

    def backward():
        grads = [(t, leaf.grad) for t, leaf in zip(old, new, strict=True) if leaf.grad is not None]
        torch.autograd.backward(*map(list, zip(*grads, strict=True)))

    return tree_unflatten(tensors, spec), backward


def check_parts(dispatcher, shape):
    layer, whole = made(dispatcher), made(dispatcher)
    x = drawn(*shape, seed=dist.get_rank())
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    state, send_back = cut(layer.begin(found))
    state, bring_back = cut(layer.compute(state))
    out = layer.finish(state)
    wanted = whole(expected)
    grad = drawn(*shape, seed=9)
    out.hidden.backward(grad)
    bring_back()
    send_back()
    wanted.hidden.backward(grad)
    assert torch.equal(out.hidden, wanted.hidden)
    assert torch.equal(out.load, wanted.load)
    assert torch.equal(found.grad, expected.grad)
    for own, other in zip(layer.parameters(), whole.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)


@pytest.mark.parametrize("shape", [(2, 5, 8), (7, 8)], ids=str)
@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
def test_parts_whose_graphs_are_apart_give_the_bits_of_the_whole(ranks, dispatcher, shape):
    ranks(2, check_parts, dispatcher, shape)
