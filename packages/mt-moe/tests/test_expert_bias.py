"""Biases that balance experts: their rules, when they count, and over which ranks."""

import pytest
import torch
from mt_moe import BiasOptions, MoELayer, MoEOptions, Router, RouterOptions, update_expert_biases
from mt_tensor_parallel import recompute
from plain import F64, drawn
from torch import distributed as dist

HIDDEN, EXPERTS = 12, 8


def made(kind="sign", seed=0, score="sigmoid", **options):
    torch.manual_seed(seed)
    bias = BiasOptions(kind=kind, **options)
    return Router(HIDDEN, EXPERTS, RouterOptions(score=score, dtype=F64, expert_bias=bias))


def test_sign_follows_the_load_once_per_step():
    router = made(rate=0.01)
    batches = [drawn(40, HIDDEN, seed=seed, dtype=torch.float32) for seed in range(3)]
    load = torch.zeros(EXPERTS)
    for x in batches:
        load += torch.bincount(router(x).experts.flatten(), minlength=EXPERTS)
    assert not router.expert_bias.value.any()
    update_expert_biases(router)
    expected = 0.01 * torch.sign(load.mean() - load)
    assert torch.equal(router.expert_bias.value, expected)
    assert not router.expert_bias.seen.any()
    update_expert_biases(router)  # a step without tokens moves nothing
    assert torch.equal(router.expert_bias.value, expected)


@pytest.mark.parametrize("kind", ["sign", "quantile"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_steps_balance_a_router_that_has_a_favourite(kind, score):
    router = made(kind, score=score, rate=0.002 if kind == "sign" else 0.5)
    with torch.no_grad():
        router.weight[3] += 0.3  # x has a positive mean
    x = drawn(512, HIDDEN, dtype=torch.float32) + 0.5

    def worst():
        load = torch.bincount(router(x).experts.flatten(), minlength=EXPERTS)
        return float(load.max() / (512 * 2 / EXPERTS))

    before = worst()
    for _ in range(250):
        update_expert_biases(router)
        worst()
    assert before > 1.8
    assert worst() < 1.35


def test_quantile_is_the_score_that_a_fair_share_of_tokens_exceeds():
    router = made("quantile", rate=1.0, bins=4096)
    x = drawn(3000, HIDDEN, dtype=torch.float32)
    router(x)
    scores = router.logits(x).sigmoid()
    target = -torch.quantile(scores, 1 - 2 / EXPERTS, dim=0)
    update_expert_biases(router)
    found = router.expert_bias.value.double()
    torch.testing.assert_close(found, target - target.mean(), rtol=0, atol=2e-3)


@pytest.mark.parametrize("kind", ["sign", "quantile"])
def test_evaluation_and_recomputation_count_nothing(kind):
    x = drawn(30, HIDDEN, dtype=torch.float32).requires_grad_()

    def seen(run):
        router = made(kind)
        run(router)
        return router.expert_bias.seen

    once = seen(lambda r: r(x).weights.sum().backward())
    assert int(once.sum()) == 30 * (2 if kind == "sign" else EXPERTS)

    def of(router):
        return lambda t: router(t).weights

    checkpoint = torch.utils.checkpoint.checkpoint
    for run in (
        lambda r: recompute(of(r), x).sum().backward(),
        lambda r: checkpoint(of(r), x, use_reentrant=False).sum().backward(),
        lambda r: checkpoint(of(r), x, use_reentrant=True).sum().backward(),
    ):
        assert torch.equal(seen(run), once)
    assert not seen(lambda r: r.eval()(x)).any()


def test_tokens_that_are_none_are_not_counted():
    x, valid = drawn(30, HIDDEN, dtype=torch.float32), torch.arange(30) < 11
    for kind in ("sign", "quantile"):
        whole, part = made(kind), made(kind)
        whole(x, valid=valid)
        part(x[:11])
        assert torch.equal(whole.expert_bias.seen, part.expert_bias.seen)


class Two(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.one, self.other = made(kind), made(kind, seed=1, score="sqrtsoftplus")

    def forward(self, x):
        return self.one(x), self.other(x)


@pytest.mark.parametrize("kind", ["sign", "quantile"])
def test_all_ranks_get_the_biases_of_all_tokens_in_one_all_reduce(ranks, kind):
    def body():
        rank, calls = dist.get_rank(), []
        x = drawn(40, HIDDEN, dtype=torch.float32)
        whole, own = Two(kind), Two(kind)
        whole(x)
        update_expert_biases(whole)
        own(x.split((9, 31))[rank])
        real = dist.all_reduce
        dist.all_reduce = lambda *a, **k: calls.append(a[0].dtype) or real(*a, **k)
        try:
            update_expert_biases(own, dist.group.WORLD)
        finally:
            dist.all_reduce = real
        assert calls == [torch.int64]
        for one, two in zip(own.buffers(), whole.buffers(), strict=True):
            assert torch.equal(one, two)
        assert own.other.expert_bias.value.any()

    ranks(2, body)


def test_the_bias_is_state_and_stays_fp32_and_moves_from_meta():
    options = MoEOptions(router=RouterOptions(score="sigmoid", expert_bias=BiasOptions()))
    layer = MoELayer(HIDDEN, 8, EXPERTS, options=options)
    names = [name for name in layer.state_dict() if "bias" in name]
    assert names == ["router.expert_bias.value"]
    layer.router.expert_bias.value.copy_(1e-3 + torch.arange(8.0))
    kept = layer.router.expert_bias.value.clone()
    for convert in (torch.nn.Module.bfloat16, torch.nn.Module.half, torch.nn.Module.double):
        convert(layer)
        assert torch.equal(layer.router.expert_bias.value, kept)
        assert layer.router.expert_bias.value.dtype == torch.float32
    empty = MoELayer(HIDDEN, 8, EXPERTS, options=options, device="meta").to(torch.bfloat16)
    empty.to_empty(device="cpu")
    assert empty.router.expert_bias.value.dtype == torch.float32
    empty.load_state_dict(layer.state_dict())
    assert torch.equal(empty.router.expert_bias.value, kept)


def test_what_has_no_bias_is_left_alone_and_errors_say_what_is_wrong():
    update_expert_biases(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="module"):
        update_expert_biases([torch.ones(2)])
    with pytest.raises(ValueError, match="follows scores"):
        RouterOptions(score="softmax_of_chosen", expert_bias=BiasOptions(kind="quantile"))
    for fields, words in (
        ({"kind": "mean"}, "kind must be"),
        ({"rate": 0}, "rate"),
        ({"rate": 1.5}, "rate"),
        ({"bins": 1}, "bins"),
    ):
        with pytest.raises(ValueError, match=words):
            BiasOptions(**fields)
