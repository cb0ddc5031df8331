"""Experts as linear layers of their own compute what the grouped layers did."""

import pytest
import torch
from mt_moe import ExpertGroups, ExpertOptions, MoELayer, MoEOptions, RouterOptions, unfuse_experts
from plain import F64, drawn
from torch import distributed as dist


def made(*, groups=None, gated=True, bias=False):
    torch.manual_seed(0)
    options = MoEOptions(
        router=RouterOptions(top_k=2, dtype=F64), experts=ExpertOptions(gated=gated, bias=bias)
    )
    return MoELayer(8, 12, 4, options=options, groups=groups, dtype=F64)


@pytest.mark.parametrize("form", [{}, {"gated": False}, {"bias": True}], ids=str)
def test_results_and_gradients_are_those_of_the_grouped_layers(form):
    grouped, apart = made(**form), made(**form)
    assert unfuse_experts(apart) == ["experts.up", "experts.down"]
    x = drawn(2, 5, 8)
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    outs = apart(found).hidden, grouped(expected).hidden
    torch.testing.assert_close(*outs, rtol=1e-12, atol=1e-12)
    for out in outs:
        out.backward(drawn(2, 5, 8, seed=3))
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-12)
    for name in ("up", "down"):
        ours = getattr(apart.experts, name)
        theirs = getattr(grouped.experts, name)
        for number, linear in ours.items():
            torch.testing.assert_close(linear.weight.grad, theirs.weight.grad[int(number)])


def check_ranks(etp):
    groups = ExpertGroups(experts=dist.group.WORLD, etp=etp)
    grouped, apart = made(groups=groups), made(groups=groups)
    unfuse_experts(apart, group=dist.group.WORLD if etp == 2 else None)
    first = 0 if etp == 2 else 2 * dist.get_rank()
    assert list(apart.experts.up) == [str(first + i) for i in range(2 * etp)]
    x = drawn(1, 6, 8, seed=dist.get_rank())
    torch.testing.assert_close(apart(x).hidden, grouped(x).hidden, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("etp", [1, 2])
def test_ranks_have_their_experts_by_their_numbers_or_parts_of_them(ranks, etp):
    ranks(2, check_ranks, etp)


def test_biases_of_experts_that_ranks_cut_are_refused(ranks):
    def body():
        layer = made(groups=ExpertGroups(experts=dist.group.WORLD, etp=2), bias=True)
        with pytest.raises(ValueError, match="use etp=1"):
            unfuse_experts(layer, group=dist.group.WORLD)

    ranks(2, body)
