"""Recomputation gives the gradients of what it replaces, with less kept."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mt_parallel_state import stream_key
from mt_tensor_parallel import DiscardedOutput, RngStreams, recompute
from torch import Tensor, nn


def _block(streams: RngStreams | None):
    torch.manual_seed(1)
    inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()

    def function(x: Tensor, scale: Tensor) -> Tensor:
        y = F.dropout(inner(x) * scale, 0.5)
        if streams is not None:
            with streams.use("inside"):
                y = F.dropout(y, 0.3)
        return y

    return inner, function


def _gradients(how, *, named: bool) -> list[Tensor]:
    streams = None
    if named:
        streams = RngStreams()
        streams.add("inside", 5)
    inner, function = _block(streams)
    torch.manual_seed(2)
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(8, dtype=torch.float64, requires_grad=True)
    first = how(function, x, scale, streams)
    second = how(function, first, scale, streams)  # later draws do not disturb earlier ones
    second.square().sum().backward()
    after = torch.rand(1, dtype=torch.float64)
    return [second.detach(), x.grad, scale.grad, *(p.grad for p in inner.parameters()), after]


@pytest.mark.parametrize("named", [False, True])
def test_gradients_and_random_numbers_are_those_without_recomputation(named) -> None:
    plain = _gradients(lambda f, x, scale, _: f(x, scale), named=named)
    again = _gradients(lambda f, x, s, streams: recompute(f, x, s, streams=streams), named=named)
    for a, b in zip(again, plain, strict=True):
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
        inner, function = _block(None)
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


def test_a_discarded_output_may_be_a_part_of_something_larger() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    activation = DiscardedOutput()
    y = activation.run(lambda x: x.sin()[2:], x).square()
    activation.discard(y)
    y.sum().backward()
    mine, x.grad = x.grad, None
    x.sin()[2:].square().sum().backward()
    assert torch.equal(mine, x.grad)


def test_streams_may_be_added_before_backward_and_errors_leave_them_as_they_were() -> None:
    streams, fails = RngStreams(), []
    streams.add("inside", 5)

    def function(x: Tensor) -> Tensor:
        with streams.use("inside"):
            y = F.dropout(x)
        if fails:
            raise FloatingPointError
        return y

    y = recompute(function, torch.ones(64, requires_grad=True), streams=streams)
    streams.add("later", 6)
    before = streams.state_dict()
    fails.append(True)
    with pytest.raises(FloatingPointError):
        y.sum().backward()
    assert all(torch.equal(before[name], state) for name, state in streams.state_dict().items())


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
    with pytest.raises(TypeError, match="returned tuple, and only one tensor"):
        recompute(lambda x: (x, x), x)


def test_streams_are_independent_named_and_saved() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    streams = RngStreams()
    streams.add("outside", stream_key(0, "dropout"))
    streams.add("inside", stream_key(0, "dropout", tp=3))
    with streams.use("inside"):
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    saved = streams.state_dict()
    with streams.use("inside"), streams.use("outside"):
        torch.rand(5)
    with streams.use("inside"):
        second = torch.rand(3)
    streams.load_state_dict(saved)
    with streams.use("inside"):
        assert torch.equal(torch.rand(3), second)
    assert not torch.equal(first, second)
    with pytest.raises(KeyError, match="no random stream 'inner'; known: inside, outside"):
        streams.use("inner").__enter__()
    with pytest.raises(RuntimeError, match="'inside' is in use already"), streams.use("inside"):
        streams.use("inside").__enter__()
    with pytest.raises(ValueError, match="there is a stream 'inside' already"):
        streams.add("inside", 1)
    with pytest.raises(ValueError, match="is that of stream 'outside'"):
        streams.add("third", stream_key(0, "dropout"))
    with pytest.raises(ValueError, match=r"the saved streams are \['x'\]"):
        streams.load_state_dict({"x": saved["inside"]})
