"""The router's logits, noise and Sinkhorn: precision, autograd, and the same on any layout."""

import pytest
import torch
from mt_moe import Router, RouterOptions, route
from mt_moe.routing.sinkhorn import sinkhorn_bias
from mt_parallel_state import scatter_to_group
from plain import F64, assert_same, drawn, gradients
from torch import distributed as dist

HIDDEN, EXPERTS = 12, 8


def made(params=F64, **options):
    torch.manual_seed(0)
    extra = {name: options.pop(name) for name in ("group", "seed", "name") if name in options}
    options = {"dtype": F64} | options
    return Router(HIDDEN, EXPERTS, RouterOptions(**options), dtype=params, **extra)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("wide", [torch.float32, F64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_are_wide_and_what_is_kept_is_not(dtype, wide, autocast):
    router, kept = made(dtype, dtype=wide, linear_bias=True), []
    x = drawn(20, HIDDEN, dtype=dtype).requires_grad_()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), hooks:
        logits = router.logits(x)
    assert logits.dtype == wide
    assert {each.dtype for each in kept} == {dtype}
    grad = drawn(20, EXPERTS, seed=1, dtype=wide)
    found = gradients(logits, grad, router, x)
    exact = made(dtype, dtype=wide, linear_bias=True).double()
    wide_x = x.detach().double().requires_grad_()
    with torch.no_grad():
        for own, other in zip(exact.parameters(), router.parameters(), strict=True):
            own.copy_(other)
    expected = torch.nn.functional.linear(wide_x, exact.weight, exact.bias)
    precise = 1e-12 if wide is F64 else 1e-5
    assert_same({"y": logits.double()}, {"y": expected}, tolerance=precise)
    rounded = gradients(expected, grad.double(), exact, wide_x)
    for name, value in rounded.items():
        assert found[name].dtype == dtype
        near = 1e-2 if dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(found[name].double(), value, rtol=near, atol=near)


@pytest.mark.parametrize("bias", [False, True])
def test_gradcheck_through_router_and_losses(bias):
    losses = {"aux": 0.5, "sequence_aux": 0.25, "z": 0.125}
    router = made(linear_bias=bias, losses=losses)

    def outputs(x, *_):
        routed = router(x)
        return routed.weights, *(loss.sum for loss in routed.losses.values())

    inputs = (drawn(2, 5, HIDDEN).requires_grad_(), *router.parameters())
    assert torch.autograd.gradcheck(outputs, inputs)


def test_jitter_is_a_function_of_token_and_name_that_stays_within_its_bounds():
    router, x = made(jitter=0.1), drawn(400, HIDDEN)
    index = torch.arange(7, 407)
    plain = made(jitter=0.0).logits(x)
    ones = router._jittered(torch.ones_like(x), index)
    assert float(ones.max()) <= 1.1
    assert float(ones.min()) >= 0.9
    assert abs(float(ones.mean()) - 1) < 0.005
    assert float(ones.std()) == pytest.approx(0.1 / 3**0.5, rel=0.05)
    assert not torch.equal(router.logits(x, index), plain)
    mixed = drawn(400).argsort()
    torch.testing.assert_close(
        router.logits(x[mixed], index[mixed]), router.logits(x, index)[mixed], rtol=0, atol=1e-13
    )
    for other in (made(jitter=0.1, seed=1), made(jitter=0.1, name="other")):
        assert not torch.equal(other._jittered(x, index), router._jittered(x, index))
    assert torch.equal(router.eval().logits(x), plain)
    with pytest.raises(ValueError, match="needs token_index in training"):
        router.train()(x)


def test_sinkhorn_has_the_sums_that_it_promises():
    logits = 3 * drawn(96, EXPERTS)
    shares = (logits + sinkhorn_bias(logits, 200)).softmax(1) / 96
    torch.testing.assert_close(shares.sum(1), torch.full((96,), 1 / 96, dtype=F64))
    torch.testing.assert_close(shares.sum(0), torch.full((EXPERTS,), 1 / 8, dtype=F64))


def test_sinkhorn_decides_the_choice_in_training_and_the_weights_remain_those_of_scores():
    router, x = made(sinkhorn=30), drawn(64, HIDDEN)
    with torch.no_grad():
        router.weight[0] += 0.5 * x.mean(0)
        x = x + 2 * router.weight[0]  # nearly all would choose the first expert
    routed, logits = router(x), router.logits(x)
    load = torch.bincount(routed.experts.flatten(), minlength=EXPERTS)
    alone = torch.bincount(route(logits, router.options).experts.flatten(), minlength=EXPERTS)
    assert load.max() < alone.max()
    biased = logits + sinkhorn_bias(logits, 30)
    assert torch.equal(routed.experts, biased.topk(2).indices)
    shares = logits.softmax(1).gather(1, routed.experts)
    torch.testing.assert_close(routed.weights, shares / shares.sum(1, keepdim=True))
    assert torch.equal(router.eval()(x).experts, route(logits, router.options).experts)


@pytest.mark.parametrize("cut", [(48, 48), (0, 96), (5, 91)], ids=str)
def test_sinkhorn_of_shards_is_that_of_the_whole(ranks, cut):
    def body():
        logits = 2 * drawn(96, EXPERTS)
        own = logits.split(cut)[dist.get_rank()]
        found = sinkhorn_bias(own, 7, group=dist.group.WORLD)
        torch.testing.assert_close(found, sinkhorn_bias(logits, 7), rtol=0, atol=1e-12)

    ranks(2, body)


LOSSES = {"aux": 0.5, "sequence_aux": 0.25, "global_aux": 0.2, "z": 0.125}


@pytest.mark.parametrize("world", [2, 4])
def test_a_cut_of_the_sequence_changes_neither_choice_nor_losses_nor_gradients(ranks, world):
    """Everything at once: Sinkhorn, jitter and four losses, over two micro-batches."""

    def run(router, batches, indices):
        totals, found = dict.fromkeys(LOSSES, 0.0), []
        for x, index in zip(batches, indices, strict=True):
            routed = router(x, token_index=index)
            (routed.weights[:, 0].sum() + sum(v.sum for v in routed.losses.values())).backward()
            for name, loss in routed.losses.items():
                totals[name] = totals[name] + loss.sum.detach()
            found.append(routed.experts)
        return totals, found, [p.grad for p in router.parameters()]

    def body():
        group = dist.group.WORLD
        options = {"losses": LOSSES, "sinkhorn": 4, "jitter": 0.1, "linear_bias": True}
        batches = [drawn(2, 8, HIDDEN, seed=seed) for seed in (0, 1)]
        indices = [torch.arange(16).view(2, 8) + 16 * at for at in (0, 1)]
        whole = run(made(**options), batches, indices)
        mine = [scatter_to_group(x, group, dim=1) for x in batches]
        numbers = [index.chunk(world, 1)[dist.get_rank()] for index in indices]
        own = run(made(group=group, **options), mine, numbers)
        for name, total in own[0].items():
            dist.all_reduce(total)
            torch.testing.assert_close(total, whole[0][name], rtol=1e-12, atol=0)
        for experts, wanted in zip(own[1], whole[1], strict=True):
            part = wanted.view(2, 8, 2).chunk(world, 1)[dist.get_rank()].reshape(-1, 2)
            assert torch.equal(experts, part)
        for grad, wanted in zip(own[2], whole[2], strict=True):
            dist.all_reduce(grad)
            torch.testing.assert_close(grad, wanted, rtol=1e-11, atol=1e-12)

    ranks(world, body)


def test_tokens_that_are_none_choose_none_and_count_nowhere():
    router = made(losses=LOSSES)
    x, valid = drawn(2, 6, HIDDEN), torch.arange(6).expand(2, 6) < 4
    routed, short = router(x, valid=valid), made(losses=LOSSES)(x[:, :4])
    none = ~valid.flatten()
    assert routed.experts[none].eq(EXPERTS).all()
    assert not routed.weights[none].any()
    for name, loss in routed.losses.items():
        assert int(loss.count) == 8
        torch.testing.assert_close(loss.sum, short.losses[name].sum, rtol=1e-13, atol=0)


def test_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match=r"x \(3, 11\) must be \[B, S, 12\] or \[T, 12\]"):
        made()(drawn(3, 11))
    with pytest.raises(TypeError, match="x"):
        made()([1.0])
    with pytest.raises(TypeError, match="options"):
        Router(HIDDEN, EXPERTS, {"top_k": 2})
