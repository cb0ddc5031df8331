"""Layers by a recipe of mt-fp8: the layout changes no code, and what travels is quantised."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from mt_fp8 import end_step, recipe
from mt_parallel_state import WgradStore, gather_from_group, scatter_to_group
from mt_tensor_parallel import (
    ColumnParallelLinear,
    QuantizedGemm,
    RowParallelLinear,
    defer_weight_gradients,
    quantize_gemms,
    recompute,
    sum_weight_gradients,
)
from torch import Tensor, nn

HIDDEN, FFN, TOKENS = 128, 256, 256
RECIPES = ("tensorwise", "rowwise", "delayed", "blockwise", "mxfp8", "nvfp4")


def exact(name: str):
    """A recipe without random rounding, whose bits would depend on where a tensor is cut."""
    how = recipe(name)
    return replace(how, grad=replace(how.grad, stochastic=False))


class Net(nn.Module):
    """A gated MLP; each rank draws the whole weights and takes its part."""

    def __init__(self, group, *, sequence_parallel: bool = False, dtype=torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"group": group, "dtype": dtype, "sequence_parallel": sequence_parallel}
        self.group, self.sequence_parallel = group, sequence_parallel
        self.up = ColumnParallelLinear(HIDDEN, (2, FFN), shard_dim=1, **options)
        self.down = RowParallelLinear(FFN, HIDDEN, **options)
        self.again = False

    def hidden(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).unbind(-2)
        return x + self.down(gate.tanh() * value)

    def forward(self, x: Tensor) -> Tensor:
        return recompute(self.hidden, x) if self.again else self.hidden(x)


class _Sum:
    def __init__(self, param: Tensor) -> None:
        self.total, self.count = torch.zeros_like(param, dtype=torch.float64), 0

    def begin(self) -> tuple[Tensor, bool]:
        return self.total, self.count > 0

    def end(self) -> None:
        self.count += 1


def _batches(count: int, dtype=torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (2, TOKENS, HIDDEN)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)
    ]


def _step(net: Net, batches: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Train on the mean square; return all outputs and gradients of inputs, whole."""
    outputs, grads = [], []
    for x in batches:
        own = scatter_to_group(x, net.group, dim=1) if net.sequence_parallel else x
        own = own.clone().requires_grad_()
        y = net(own)
        y.backward(y.detach() / 1000)
        outputs.append(y.detach())
        grads.append(own.grad)
    if not net.sequence_parallel:
        return torch.stack(outputs), torch.stack(grads)
    whole = (gather_from_group(torch.stack(each), net.group, dim=2) for each in (outputs, grads))
    return tuple(whole)


# Each recipe once in CI, with sequence parallelism in every second.
SPLIT = [
    pytest.param(name, sp, marks=() if sp == i % 2 else pytest.mark.campaign)
    for i, name in enumerate(RECIPES)
    for sp in (False, True)
]


@pytest.mark.parametrize(("name", "sequence_parallel"), SPLIT)
def test_layers_split_over_ranks_have_the_codes_of_one_rank(ranks, name, sequence_parallel) -> None:
    """Two steps of two micro-batches, recomputed, with deferred sums: in fp64 a code would tell."""

    def body() -> None:
        group, batches = dist.group.WORLD, _batches(4)
        whole, net = Net(None), Net(group, sequence_parallel=sequence_parallel)
        net.again = True
        sinks = {layer.weight: _Sum(layer.weight) for layer in (net.up, net.down)}
        sum_weight_gradients(net, sinks.get)
        defer_weight_gradients(net, store := WgradStore())
        gemms = [quantize_gemms(each, lambda _: exact(name)) for each in (whole, net)]
        for step in range(2):
            own = batches[2 * step : 2 * step + 2]
            expected = _step(whole, own)
            with store.deferring() as compute:
                found = _step(net, own)
            compute()
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
            states = [[gemm.delayed for gemm in each.values()] for each in gemms]
            if states[0][0] is not None:
                end_step(states[0])
                end_step(states[1], group)
                for one, other in zip(*states, strict=True):
                    torch.testing.assert_close(one.factor, other.factor, rtol=1e-6, atol=0)
        for layer, reference in ((net.up, whole.up), (net.down, whole.down)):
            grad = gather_from_group(sinks[layer.weight].total, group, dim=1)
            torch.testing.assert_close(grad, reference.weight.grad, rtol=1e-9, atol=1e-9)

    ranks(2, body)


@pytest.mark.parametrize(
    ("name", "most"), [("tensorwise", 0.51), ("mxfp8", 0.52), ("blockwise", 0.52), ("nvfp4", 0.29)]
)
def test_what_is_gathered_is_quantised(ranks, name, most) -> None:
    def body() -> None:
        sent: dict[str, int] = {}
        gather = dist.all_gather_into_tensor
        for kind in ("plain", "quantised"):
            net = Net(dist.group.WORLD, sequence_parallel=True, dtype=torch.bfloat16)
            if kind == "quantised":
                quantize_gemms(net, lambda _: recipe(name))
            x = scatter_to_group(_batches(1, torch.bfloat16)[0], net.group, dim=1)
            sizes: list[int] = []

            def noted(out, own, sizes=sizes, **options):
                sizes.append(own.nbytes)
                return gather(out, own, **options)

            dist.all_gather_into_tensor = noted
            try:
                y = net.up(x.requires_grad_())  # forward, and again for the weight's gradient
                y.sum().backward()
            finally:
                dist.all_gather_into_tensor = gather
            sent[kind] = sum(sizes)
        assert 0 < sent["quantised"] <= most * sent["plain"]

    ranks(2, body)


def test_a_share_of_tokens_that_is_no_whole_blocks_is_refused_with_a_way_out(ranks) -> None:
    def body() -> None:
        net = Net(dist.group.WORLD, sequence_parallel=True)
        quantize_gemms(net, lambda _: exact("blockwise"))
        y = net.up(torch.randn(2, 64, HIDDEN, dtype=torch.float64, requires_grad=True))
        words = "64 tokens of a sequence are no whole blocks of 128, so they can't be gathered; use"
        with pytest.raises(ValueError, match=words):
            y.sum().backward()

    ranks(2, body)


def test_parts_of_ranks_that_are_no_whole_blocks_are_refused(ranks) -> None:
    def body() -> None:
        net = nn.Module()
        # Of a rank's 384 rows of the weight, which are whole blocks, 192 are in a row.
        net.up = ColumnParallelLinear(64, (2, 384), shard_dim=1, group=dist.group.WORLD)
        with pytest.raises(ValueError, match="a rank has 192 outputs of 'up' in a row, which is"):
            quantize_gemms(net, lambda _: recipe("blockwise"))
        quantize_gemms(net, lambda _: recipe("mxfp8"))
        net.down = RowParallelLinear(96, 64, group=dist.group.WORLD)
        with pytest.raises(ValueError, match="a rank has 48 inputs of 'down' in a row, which is"):
            quantize_gemms(net, lambda _: recipe("mxfp8"))

    ranks(2, body)


def test_layers_get_recipes_by_name_and_keep_their_parameters() -> None:
    net = Net(None)
    before = list(net.state_dict())
    made = quantize_gemms(net, lambda name: recipe("delayed") if name == "down" else None)
    assert list(made) == ["down"]
    assert isinstance(net.down.gemm, QuantizedGemm)
    assert not isinstance(net.up.gemm, QuantizedGemm)
    assert repr(net.down.gemm) == "QuantizedGemm('delayed')"
    state = {f"down.gemm.delayed.{key}" for key in ("history", "factor")}
    assert set(net.state_dict()) == {*before, *state}
    with pytest.raises(TypeError, match="what recipe_for returns must be"):
        quantize_gemms(net, lambda _: "delayed")


def test_without_a_gradient_a_tensor_is_quantised_once(monkeypatch) -> None:
    made: list[str] = []
    inner = QuantizedGemm._quantized

    def counting(self, matrix, role, amax, *, column=False):
        made.append(role)
        return inner(self, matrix, role, amax, column=column)

    monkeypatch.setattr(QuantizedGemm, "_quantized", counting)
    net = Net(None)
    quantize_gemms(net, lambda _: recipe("mxfp8"))
    x = _batches(1)[0]
    with torch.no_grad():
        without = net(x)
    assert made.count("input") == 2
    made.clear()
    torch.testing.assert_close(net(x), without, rtol=0, atol=0)
    assert made.count("input") == 4  # in the form that backward multiplies, too
