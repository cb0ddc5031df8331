"""Weights only in codes: equal to the codes of the whole master, for any sharding of it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from mt_fp8 import (
    PrimaryWeights,
    Products,
    Recipe,
    Scaling,
    Split,
    convert_linears,
    quantize,
    recipe,
    update_scales,
)
from mt_fp8.products import products_of
from torch import Tensor, nn

RECIPES = ("tensorwise", "delayed", "blockwise")
SHAPES = ((1, 1, 1), (1, 5, 7), (3, 130, 257), (1, 256, 128), (2, 300, 40))
RANKS = 3
UNEVEN = Recipe(name="uneven", input=None, weight=Scaling(format="e5m2", block=(16, 16)), grad=None)


@dataclass(frozen=True)
class Part:
    name: str
    source: Tensor
    values: Tensor
    codes: Tensor
    start: int
    shards: dist.ProcessGroup | None


def drawn(shape: tuple[int, ...], seed: int) -> tuple[Tensor, list[int]]:
    """A stack of masters with outliers and zeros, and where ranks' parts begin."""
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(
        -20, 10, (shape[0], 1, 1), generator=generator
    )
    master.view(-1)[:: 7 + seed] *= 100
    master.view(-1)[:2] = 0
    inner = torch.randint(0, master.numel() + 1, (RANKS - 1,), generator=generator)
    return master, [0, *inner.sort().values.tolist(), master.numel()]


def encoded(how: Recipe, master: Tensor, cuts: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Encode this rank's part, and return all ranks' codes and the layers' dequantised weights."""
    rank = dist.get_rank()
    codes = torch.zeros(master.shape, dtype=torch.uint8)
    begin, end = cuts[rank], cuts[rank + 1]
    layers = [Products(how) for _ in master]
    primary = PrimaryWeights(["weight"])
    primary.bind("weight", master.bfloat16(), layers)
    primary.place("weight", codes)
    values, own = master.view(-1)[begin:end], codes.view(-1)[begin:end]
    primary.encode([Part("weight", master, values, own, begin, dist.group.WORLD)])
    dist.all_reduce(codes, op=dist.ReduceOp.SUM)
    nothing = torch.full((), torch.nan, dtype=torch.bfloat16).expand(master.shape[1:])
    held = [layer.operand(nothing, "weight").rows for layer in layers]
    return codes, [q.dequantize(torch.float32) for q in held]


@pytest.mark.parametrize("name", [*RECIPES, "uneven"])
def test_codes_and_scales_are_those_of_the_whole_master_however_it_is_cut(name, ranks) -> None:
    how = UNEVEN if name == "uneven" else recipe(name)

    def body() -> list[tuple[bool, bool]]:
        found = []
        for seed, shape in enumerate(SHAPES * 3):
            master, cuts = drawn(shape, seed)
            codes, weights = encoded(how, master, cuts)
            whole = [quantize(matrix, how.scaling("weight")) for matrix in master]
            same = torch.equal(codes, torch.stack([q.data.view(torch.uint8) for q in whole]))
            pairs = zip(weights, whole, strict=True)
            found.append((same, all(torch.equal(w, q.dequantize(torch.float32)) for w, q in pairs)))
        return found

    for found in ranks(RANKS, body):
        assert found == [(True, True)] * 3 * len(SHAPES)


def test_one_scale_is_of_all_that_tensor_parallel_ranks_hold(ranks) -> None:
    how = recipe("tensorwise")

    def body() -> bool:
        whole = torch.arange(2.0 * 12 * 4).view(2, 12, 4) - 30
        own = whole[dist.get_rank()]
        layer = Products(
            how, splits={"weight": Split(rows=dist.group.WORLD, both=dist.group.WORLD)}
        )
        primary, codes = PrimaryWeights(["weight"]), torch.zeros(12, 4, dtype=torch.uint8)
        primary.bind("weight", own, [layer])
        primary.place("weight", codes)
        primary.encode([Part("weight", own, own.flatten(), codes.flatten(), 0, None)])
        expected = quantize(whole.flatten(0, 1), how.scaling("weight")).dequantize()
        found = layer.operand(own, "weight").rows.dequantize()
        return torch.equal(found, expected.view_as(whole)[dist.get_rank()])

    assert ranks(2, body) == [True, True]


@pytest.mark.parametrize("name", RECIPES)
def test_layers_train_as_with_values_and_what_they_know_of_scales_is_the_same(name) -> None:
    def train(*, primary: bool) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(96, 160), nn.ReLU(), nn.Linear(160, 96))
        convert_linears(model, name)
        masters = {n: p.detach().clone() for n, p in model.named_parameters()}
        held, parts = PrimaryWeights.of(model), []
        for n in sorted(held.names):
            codes = torch.zeros(masters[n].shape, dtype=torch.uint8)
            held.place(n, codes)
            parts.append(Part(n, masters[n], masters[n].view(-1), codes.view(-1), 0, None))
            if primary:  # nothing of the values is left
                model.get_parameter(n).data = torch.full((), torch.nan).expand(masters[n].shape)
        losses = []
        for step in range(4):
            if primary:
                held.encode(parts)
            for micro_batch in range(2):
                generator = torch.Generator().manual_seed(2 * step + micro_batch)
                x = torch.randn(32, 96, generator=generator)
                loss = (model(x) - x).square().mean()
                loss.backward()
                losses.append(loss.item())
            update_scales(model)
            for n, param in model.named_parameters():
                masters[n].sub_(param.grad, alpha=0.1)
                param.grad = None
                if not primary or n not in held.names:
                    param.data.copy_(masters[n])
        states = [p.delayed for p in products_of(model) if p.delayed is not None]
        return losses, [t for state in states for t in (state.history, state.factor)]

    (ours, own), (theirs, other) = train(primary=True), train(primary=False)
    assert ours == theirs
    assert len(own) == len(other) == (4 if name == "delayed" else 0)
    assert all(map(torch.equal, own, other))


def test_recipes_whose_weights_need_their_values_are_refused() -> None:
    for name in ("rowwise", "mxfp8", "nvfp4"):
        model = nn.Sequential(nn.Linear(16, 16))
        convert_linears(model, name)
        with pytest.raises(
            ValueError, match=rf"'0\.weight': recipe '{name}' .* use one of {', '.join(RECIPES)}$"
        ):
            PrimaryWeights.of(model)


def test_calls_in_another_order_and_other_layers_are_errors() -> None:
    layer, weight = Products(recipe("blockwise")), torch.ones(4, 4)
    primary = PrimaryWeights(["up.weight"])
    with pytest.raises(TypeError, match="several names, got the string"):
        PrimaryWeights("up.weight")
    with pytest.raises(ValueError, match=r"no primary weight\. Did you mean up\.weight\?"):
        primary.bind("up.weigth", weight, [layer])
    with pytest.raises(ValueError, match=r"\(4, 4\), and there are 2 layers; give"):
        primary.bind("up.weight", weight, [layer, layer])
    with pytest.raises(ValueError, match="no quantised layers; call convert_linears first"):
        PrimaryWeights.of(nn.Linear(2, 2))
    twins = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    convert_linears(twins, "blockwise")
    twins[1].weight = twins[0].weight
    with pytest.raises(ValueError, match="two layers share a weight"):
        PrimaryWeights.of(twins)
    codes = torch.zeros(16, dtype=torch.uint8)
    primary.place("up.weight", codes.view(4, 4))
    with pytest.raises(RuntimeError, match=r"nobody said which layer .* call bind\(\)"):
        primary.encode([Part("up.weight", weight, weight.view(-1), codes, 0, None)])
