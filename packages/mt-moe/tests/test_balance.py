"""Balancing losses against their published sums, and what they may not touch."""

import pytest
import torch
from mt_moe import Router, RouterOptions
from mt_moe.routing.balance import balance_loss, count_choices, normalized, z_loss
from mt_tensor_parallel import recompute
from plain import F64, drawn

HIDDEN, EXPERTS = 12, 8


def plain_aux(scores, k):
    """`E / (k T^2) sum_e (sum_t P_te) count_e`, of choices by the scores alone."""
    tokens, experts = scores.shape
    shares = scores / scores.sum(1, keepdim=True)
    counts = torch.bincount(scores.topk(k).indices.flatten(), minlength=experts)
    return experts / (k * tokens**2) * (shares.sum(0) * counts).sum()


@pytest.mark.parametrize("score", ["softmax", "softmax_of_chosen", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("k", [2, 3])
def test_losses_are_their_formulas(score, k):
    losses = {"aux": 0.5, "sequence_aux": 0.25, "global_aux": 2.0, "z": 0.125}
    torch.manual_seed(0)
    router = Router(
        HIDDEN, EXPERTS, RouterOptions(top_k=k, score=score, dtype=F64, losses=losses), dtype=F64
    )
    x = drawn(3, 10, HIDDEN)
    logits = router.logits(x)
    scores = {
        "sigmoid": logits.sigmoid(),
        "sqrtsoftplus": logits.exp().log1p().sqrt(),
    }.get(score, logits.softmax(-1))
    whole = plain_aux(scores.flatten(0, 1), k)
    each = torch.stack([plain_aux(sequence, k) for sequence in scores]).mean()
    z = logits.exp().sum(-1).log().square().mean()
    expected = {"aux": 0.5 * whole, "sequence_aux": each / 4, "global_aux": 2 * whole, "z": z / 8}
    found = {name: loss.mean for name, loss in router(x).losses.items()}
    assert list(found) == list(losses)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=0)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("name", ["aux", "sequence_aux", "global_aux"])
def test_perfect_balance_costs_exactly_the_coefficient(name, k):
    """Each token prefers other experts, each of which is as popular as the others."""
    options = RouterOptions(top_k=k, normalize=False, dtype=F64, losses={name: 0.375})
    router = Router(EXPERTS, EXPERTS, options, dtype=F64)
    with torch.no_grad():
        router.weight.copy_(torch.eye(EXPERTS))
    logits = torch.stack([torch.arange(8.0, dtype=F64).roll(at) for at in range(EXPERTS)])
    load = torch.bincount(router(logits).experts.flatten(), minlength=EXPERTS)
    assert torch.equal(load, torch.full_like(load, k))
    router.end_step()
    loss = router(torch.stack([logits, logits])).losses[name].mean
    torch.testing.assert_close(loss, torch.tensor(0.375, dtype=F64), rtol=1e-15, atol=0)
    one_favourite = router(logits + 9 * torch.eye(EXPERTS, dtype=F64)[0]).losses[name].mean
    assert one_favourite > 0.4


def test_global_aux_has_the_load_of_the_step_so_far():
    options = RouterOptions(dtype=F64, losses={"global_aux": 1.0})
    torch.manual_seed(0)
    router = Router(HIDDEN, EXPERTS, options, dtype=F64)
    for _ in range(2):  # a second step begins anew
        counts, tokens = torch.zeros(EXPERTS, dtype=F64), 0
        for seed, number in enumerate((8, 20, 4)):
            x = drawn(1, number, HIDDEN, seed=seed)
            shares = router.logits(x)[0].softmax(-1)
            counts += torch.bincount(shares.topk(2).indices.flatten(), minlength=EXPERTS)
            tokens += number
            expected = EXPERTS * (shares.mean(0) * counts / (2 * tokens)).sum()
            found = router(x).losses["global_aux"].mean
            torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
        router.end_step()


@pytest.mark.parametrize("how", ["torch", "reentrant", "ours"])
def test_a_recomputation_sees_the_load_that_its_forward_saw(how):
    def step(again):
        torch.manual_seed(0)
        losses = {"global_aux": 1.0, "aux": 0.5}
        router = Router(HIDDEN, EXPERTS, RouterOptions(dtype=F64, losses=losses), dtype=F64)
        batches = [drawn(2, 6, HIDDEN, seed=seed).requires_grad_() for seed in range(3)]

        def loss_of(x):
            return sum(loss.sum for loss in router(x).losses.values())

        def run(x):
            if not again:
                return loss_of(x)
            if how == "ours":
                return recompute(loss_of, x)
            keep = {"use_reentrant": how == "reentrant"}
            return torch.utils.checkpoint.checkpoint(loss_of, x, **keep)

        found = [run(x) for x in batches]  # all forwards before all backwards, as in a pipeline
        for loss in found:
            loss.backward()
        return [*found, router.weight.grad, *(x.grad for x in batches)]

    for one, other in zip(step(again=True), step(again=False), strict=True):
        assert torch.equal(one, other)


def test_evaluation_leaves_the_step_as_it_was():
    router = Router(HIDDEN, EXPERTS, RouterOptions(losses={"global_aux": 1.0}))
    router(drawn(5, HIDDEN, dtype=torch.float32))
    before = router.so_far.clone()
    router.eval()(drawn(5, HIDDEN, seed=1, dtype=torch.float32))
    assert torch.equal(router.so_far, before)
    assert "so_far" not in router.state_dict()


def test_a_loss_that_nobody_adds_changes_no_gradient():
    def step(losses, add):
        torch.manual_seed(0)
        router = Router(HIDDEN, EXPERTS, RouterOptions(dtype=F64, losses=losses), dtype=F64)
        x = drawn(2, 6, HIDDEN).requires_grad_()
        routed = router(x)
        total = routed.weights[:, 0].sum()
        if add:
            total = total + sum(loss.sum for loss in routed.losses.values())
        total.backward()
        return router.weight.grad, x.grad

    losses = {"aux": 10.0, "sequence_aux": 10.0, "global_aux": 10.0, "z": 10.0}
    plain, quiet, added = step({}, add=False), step(losses, add=False), step(losses, add=True)
    for one, two, three in zip(plain, quiet, added, strict=True):
        assert torch.equal(one, two)
        assert not torch.equal(one, three)


def test_the_functions_stand_alone():
    logits = drawn(2, 9, EXPERTS)
    shares = normalized(logits.sigmoid())
    torch.testing.assert_close(shares.sum(-1), torch.ones(2, 9, dtype=F64))
    experts = shares.topk(2).indices
    valid = torch.rand(2, 9) < 0.5
    counts = count_choices(experts, EXPERTS, valid)
    for batch in range(2):
        kept = experts[batch][valid[batch]].flatten()
        assert torch.equal(counts[batch], torch.bincount(kept, minlength=EXPERTS))
    loss = balance_loss(shares, counts, valid.sum(1), top_k=2, valid=valid)
    assert int(loss.count) == int(valid.sum())
    assert float(z_loss(logits, torch.zeros(2, 9, dtype=torch.bool)).sum) == 0
