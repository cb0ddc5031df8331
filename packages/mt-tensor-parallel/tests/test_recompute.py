"""Recomputation gives the gradients of what it replaces, with less kept."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mt_tensor_parallel import DiscardedOutput, recompute
from torch import Tensor, nn


def _block():
    torch.manual_seed(1)
    inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()

    def function(x: Tensor, scale: Tensor) -> Tensor:
        return F.dropout(inner(x) * scale, 0.5)

    return inner, function


def _gradients(how) -> list[Tensor]:
    inner, function = _block()
    torch.manual_seed(2)
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(8, dtype=torch.float64, requires_grad=True)
    first = how(function, x, scale)
    second = how(function, first, scale)  # later draws do not disturb earlier ones
    second.square().sum().backward()
    after = torch.rand(1, dtype=torch.float64)
    return [second.detach(), x.grad, scale.grad, *(p.grad for p in inner.parameters()), after]


def test_gradients_and_random_numbers_are_those_without_recomputation() -> None:
    plain = _gradients(lambda f, x, scale: f(x, scale))
    again = _gradients(recompute)
    for a, b in zip(again, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1), (0, 1, 2)])
def test_each_of_several_outputs_has_its_gradient(used: tuple[int, ...]) -> None:
    linear = nn.Linear(8, 8).double()

    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = F.dropout(linear(x), 0.5)
        return y, y.square().sum(), x.exp().mean()

    def gradients(how) -> list[Tensor]:
        linear.zero_grad()
        torch.manual_seed(2)
        x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
        outputs = how(function, x)
        sum((3 + i) * outputs[i].sin().sum() for i in used).backward()
        return [*(y.detach() for y in outputs), x.grad, *(p.grad for p in linear.parameters())]

    for a, b in zip(gradients(recompute), gradients(lambda f, x: f(x)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_parameters_behind_a_frozen_input_get_their_gradients() -> None:
    linear, x = nn.Linear(4, 3), torch.ones(2, 4)
    recompute(linear, x).sum().backward()
    assert torch.equal(linear.weight.grad, torch.full((3, 4), 2.0))
    recompute(lambda x: x * 2, x).sum().backward()  # nothing inside needs one
    norm, activation = nn.LayerNorm(4), DiscardedOutput()
    y = linear(activation.run(norm, x))
    activation.discard(y)
    y.sum().backward()
    assert norm.bias.grad is not None
    with torch.no_grad():
        assert not recompute(linear, x).requires_grad


@pytest.mark.parametrize("how", ["recompute", "discarded"])
def test_the_second_run_is_cast_like_the_first(how: str) -> None:
    linear, seen = nn.Linear(4, 4), []

    def function(x: Tensor) -> Tensor:
        seen.append(linear(x).dtype)
        return linear(x)

    x = torch.ones(2, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if how == "recompute":
            y = recompute(function, x)
        else:
            activation = DiscardedOutput()
            y = activation.run(function, x).sin()
            activation.discard(y)
    y.float().sum().backward()
    assert seen == [torch.bfloat16] * 2


def test_only_the_inputs_are_kept_and_each_rank_keeps_its_share(ranks) -> None:
    def body() -> None:
        group = dist.group.WORLD
        inner, function = _block()
        torch.manual_seed(2)
        x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
        scale = torch.ones(8, dtype=torch.float64)
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.numel()) or t, lambda t: t
        ):
            torch.manual_seed(3)
            y = recompute(function, x, scale, group=group)
        assert kept == [x.numel() // 2, 8]
        y.square().sum().backward()
        mine = [x.grad, *(p.grad.clone() for p in inner.parameters())]
        inner.zero_grad()
        x.grad = None
        torch.manual_seed(3)
        function(x, scale).square().sum().backward()
        for a, b in zip(mine, [x.grad, *(p.grad for p in inner.parameters())], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        with pytest.raises(ValueError, match=r"shape \(3, 5\) cannot be shared by 2 ranks"):
            recompute(lambda x: x, torch.ones(3, 5), group=group)

    ranks(2, body)


@pytest.mark.parametrize("discards", [True, False])
def test_a_discarded_output_comes_back_for_backward(discards: bool) -> None:
    def run(how) -> list[Tensor]:
        torch.manual_seed(0)
        norm, linear = nn.LayerNorm(8).double(), nn.Linear(8, 4).double()
        x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
        y = how(lambda x: F.dropout(norm(x), 0.5), linear, x)
        torch.rand(1)
        y.square().sum().backward()
        modules = nn.ModuleList([norm, linear])
        return [y.detach(), x.grad, *(p.grad for p in modules.parameters())]

    def through(function, linear, x) -> Tensor:
        activation = DiscardedOutput()
        h = activation.run(function, x)
        y = linear(h)
        if discards:
            activation.discard(y)
            assert h.untyped_storage().size() == 0
        return y

    for a, b in zip(run(through), run(lambda f, g, x: g(f(x))), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)])
def test_a_discarded_output_comes_back_for_whichever_result_is_first(weights) -> None:
    linear = nn.Linear(8, 4).double()

    def gradient(discards: bool) -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
        activation = DiscardedOutput()
        h = activation.run(torch.sin, x) if discards else x.sin()
        y, other = linear(h), h.square().sum()
        if discards:
            activation.discard(y, other, torch.ones(1))
            assert h.untyped_storage().size() == 0
        results = zip(weights, (y.square().sum(), other), strict=True)
        sum(weight * result for weight, result in results if weight).backward()
        return x.grad

    torch.testing.assert_close(gradient(True), gradient(False), rtol=1e-13, atol=1e-13)


def test_a_discarded_output_may_be_a_part_of_something_larger() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    activation = DiscardedOutput()
    y = activation.run(lambda x: x.sin()[2:], x).square()
    activation.discard(y)
    y.sum().backward()
    mine, x.grad = x.grad, None
    x.sin()[2:].square().sum().backward()
    assert torch.equal(mine, x.grad)


def test_an_error_in_backward_leaves_the_generator_as_it_was() -> None:
    fails = []

    def function(x: Tensor) -> Tensor:
        y = F.dropout(x)
        if fails:
            raise FloatingPointError
        return y

    y = recompute(function, torch.ones(64, requires_grad=True))
    before = torch.get_rng_state()
    fails.append(True)
    with pytest.raises(FloatingPointError):
        y.sum().backward()
    assert torch.equal(before, torch.get_rng_state())


def test_misuse_of_a_discarded_output_is_named() -> None:
    once = DiscardedOutput()
    with pytest.raises(RuntimeError, match=r"discard\(\) before run\(\)"):
        once.discard(torch.ones(1))
    x = torch.ones(2, requires_grad=True)
    once.run(torch.sin, x)
    with pytest.raises(RuntimeError, match="has run already"):
        once.run(torch.sin, x)
    with pytest.raises(ValueError, match="result needs no gradient"):
        once.discard(torch.ones(1))
    with pytest.raises(ValueError, match="needs at least one input"):
        recompute(lambda: x)
    with pytest.raises(TypeError, match="returned Tensor, int, and only a tensor or a tuple of"):
        recompute(lambda x: (x, 3), x)
    with pytest.raises(TypeError, match="returned an empty tuple"):
        recompute(lambda x: (), x)
    with pytest.raises(TypeError, match="returned tuple, not one tensor"):
        DiscardedOutput().run(lambda x: (x, x), x)
