"""Column and row parallel linears against dense ones, in fp64 and to 1e-10."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mt_parallel_state import PartitionSpec, gather_from_group, scatter_to_group, sharding_of
from mt_tensor_parallel import (
    ColumnParallelLinear,
    Gemm,
    RowParallelLinear,
    functional,
    parallel_linear,
)
from torch import Tensor, nn

HIDDEN, FFN, BATCH, SEQUENCE = 12, 16, 2, 8
F64 = torch.float64


def _close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


class GatedMLP(nn.Module):
    def __init__(self, group: dist.ProcessGroup | None, *, sequence_parallel: bool) -> None:
        super().__init__()
        common = {"group": group, "bias": True, "dtype": F64}
        common["sequence_parallel"] = sequence_parallel
        self.up = ColumnParallelLinear(HIDDEN, (2, FFN), shard_dim=1, **common)
        self.down = RowParallelLinear(FFN, HIDDEN, **common)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).unbind(-2)
        return self.down(F.silu(gate) * up)


class Heads(nn.Module):
    """The shapes of grouped-query attention: a fused projection, heads in, heads out."""

    def __init__(self, group: dist.ProcessGroup | None, *, sequence_parallel: bool) -> None:
        super().__init__()
        common = {"group": group, "bias": True, "dtype": F64}
        common["sequence_parallel"] = sequence_parallel
        self.up = ColumnParallelLinear(HIDDEN, (4, 2 + 2, 3), shard_dim=0, **common)
        self.down = RowParallelLinear((4, 2, 3), HIDDEN, shard_dim=0, **common)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.up(x).split([2, 1, 1], dim=-2)
        return self.down(q * k.tanh() + v)


def _run(module: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(grad)
    grads = {name: param.grad for name, param in module.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}  # type: ignore[dict-item]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", [GatedMLP, Heads])
def test_a_column_row_pair_equals_the_dense_one(
    ranks, world: int, sequence_parallel: bool, kind: type[nn.Module]
) -> None:
    def body() -> None:
        group = dist.group.WORLD
        torch.manual_seed(0)
        x, grad = torch.randn(2, BATCH, SEQUENCE, HIDDEN, dtype=F64)
        torch.manual_seed(1)
        dense = kind(None, sequence_parallel=False)
        expected = _run(dense, x, grad)
        torch.manual_seed(1)
        split = kind(group, sequence_parallel=sequence_parallel)
        if sequence_parallel:
            x, grad = (scatter_to_group(t, group, dim=1) for t in (x, grad))
        actual = _run(split, x, grad)
        for name, param in split.named_parameters():
            record = sharding_of(param)
            if record.partial_grad:
                assert record.partial_grad == ("tp",)
                dist.all_reduce(actual[name])
            for dim, axes in enumerate(record.spec.dims):
                if axes:
                    actual[name] = gather_from_group(actual[name], group, dim=dim)
        if sequence_parallel:
            for name in ("y", "x"):
                actual[name] = gather_from_group(actual[name], group, dim=1)
        assert actual.keys() == expected.keys()
        for name in expected:
            _close(actual[name], expected[name])

    ranks(world, body)


def test_the_dense_pair_is_plain_matrix_algebra() -> None:
    torch.manual_seed(0)
    mlp = GatedMLP(None, sequence_parallel=True)  # without a group there is nothing to split
    x = torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=F64)
    gate = x @ mlp.up.weight[0].T + mlp.up.bias[0]
    up = x @ mlp.up.weight[1].T + mlp.up.bias[1]
    _close(mlp(x), (gate * gate.sigmoid() * up) @ mlp.down.weight.T + mlp.down.bias)


@pytest.mark.parametrize("world", [2, 4])
def test_one_seed_gives_one_logical_weight_for_any_group(ranks, world: int) -> None:
    def body() -> dict[str, Tensor]:
        torch.manual_seed(3)
        heads = Heads(dist.group.WORLD, sequence_parallel=False)
        return {name: param.detach() for name, param in heads.named_parameters()}

    torch.manual_seed(3)
    whole = dict(Heads(None, sequence_parallel=False).named_parameters())
    parts = ranks(world, body)
    assert torch.equal(torch.cat([p["up.weight"] for p in parts], 0), whole["up.weight"])
    assert torch.equal(torch.cat([p["down.weight"] for p in parts], 1), whole["down.weight"])
    assert torch.equal(torch.cat([p["up.bias"] for p in parts], 0), whole["up.bias"])
    assert all(torch.equal(p["down.bias"], whole["down.bias"]) for p in parts)


@pytest.mark.parametrize("world", [2, 4])
def test_gate_and_up_are_the_pieces_that_megatron_gives_a_rank(ranks, world: int) -> None:
    """Stride 2: of 2 * ranks pieces of the fused rows, rank t has pieces t and t + ranks."""

    def body() -> Tensor:
        torch.manual_seed(3)
        layer = ColumnParallelLinear(HIDDEN, (2, FFN), shard_dim=1, group=dist.group.WORLD)
        return layer.weight.detach()

    torch.manual_seed(3)
    fused = ColumnParallelLinear(HIDDEN, (2, FFN), shard_dim=1).weight.flatten(0, 1)
    pieces = fused.chunk(2 * world)
    for rank, own in enumerate(ranks(world, body)):
        assert torch.equal(own.flatten(0, 1), torch.cat(pieces[rank::world]))


def test_parameters_record_how_they_are_split(ranks) -> None:
    def body() -> None:
        group = dist.group.WORLD
        up = ColumnParallelLinear(4, (2, 6), shard_dim=1, group=group, axis="etp", bias=True)
        assert sharding_of(up.weight).spec == PartitionSpec(None, "etp", None)
        assert sharding_of(up.bias).spec == PartitionSpec(None, "etp")
        down = RowParallelLinear((3, 4), 8, shard_dim=1, group=group, bias=True)
        assert sharding_of(down.weight).spec == PartitionSpec(None, None, "tp")
        assert sharding_of(down.bias).partial_grad == ()
        meta = ColumnParallelLinear(4, 6, group=group, device="meta", dtype=torch.bfloat16)
        assert meta.weight.is_meta
        assert meta.weight.shape == (3, 4)
        assert meta.weight.dtype == torch.bfloat16

    ranks(2, body)
    assert sharding_of(ColumnParallelLinear(4, 6).weight).spec == PartitionSpec()


class DoublingGemm(Gemm):
    """Not what torch computes, so that a layer which bypasses it is found out."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self.calls.append("forward")
        y = 2 * F.linear(x, weight)
        return y if bias is None else y + bias

    def dgrad(self, grad_y: Tensor, weight: Tensor) -> Tensor:
        self.calls.append("dgrad")
        return 3 * grad_y @ weight

    def wgrad(self, grad_y: Tensor, x: Tensor) -> Tensor:
        self.calls.append("wgrad")
        return 5 * grad_y.flatten(0, -2).T @ x.flatten(0, -2)


def _check_doubling(group: dist.ProcessGroup | None, mode: str) -> None:
    gemm = DoublingGemm()
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, dtype=F64, requires_grad=True)
    w, b = torch.randn(6, 4, dtype=F64, requires_grad=True), torch.randn(6, dtype=F64)
    b.requires_grad_()
    y = parallel_linear(x, w, b, mode=mode, group=group, gemm=gemm)  # type: ignore[arg-type]
    grad = torch.randn_like(y)
    y.backward(grad)
    assert gemm.calls == ["forward", "dgrad", "wgrad"]
    n = 1 if group is None else group.size()
    _close(y, 2 * (n if mode == "row" else 1) * (x @ w.T) + b)
    _close(x.grad, 3 * (n if mode == "column" else 1) * grad @ w)
    _close(w.grad, 5 * grad.flatten(0, 1).T @ x.flatten(0, 1))
    _close(b.grad, grad.sum((0, 1)))


def test_every_product_goes_through_the_gemm(ranks) -> None:
    def body() -> None:
        for mode in ("column", "row"):
            _check_doubling(dist.group.WORLD, mode)

    ranks(2, body)
    _check_doubling(None, "column")


def test_frozen_weights_compute_no_wgrad(ranks) -> None:
    def body() -> None:
        for mode in ("column", "row"):
            for group in (dist.group.WORLD, None):
                gemm = DoublingGemm()
                x = torch.randn(2, 2, 4, requires_grad=True)
                parallel_linear(
                    x, torch.randn(6, 4), mode=mode, group=group, gemm=gemm
                ).sum().backward()
                assert gemm.calls == ["forward", "dgrad"]
                weight = torch.randn(6, 4, requires_grad=True)
                gemm.calls.clear()
                parallel_linear(
                    torch.randn(2, 2, 4), weight, mode=mode, group=group, gemm=gemm
                ).sum().backward()
                assert gemm.calls == ["forward", "wgrad"]

    ranks(2, body)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_reduction_of_dgrad_overlaps_wgrad(ranks, sequence_parallel: bool) -> None:
    """Backward launches the collective before wgrad and waits for it after."""

    def body() -> list[str]:
        gemm, name = DoublingGemm(), "start_all_reduce"
        if sequence_parallel:
            name = "start_reduce_scatter"
        start = getattr(functional, name)

        class Noted:
            def __init__(self, pending) -> None:
                self.pending = pending

            def wait(self) -> Tensor:
                gemm.calls.append("wait")
                return self.pending.wait()

        def noted(*args):
            gemm.calls.append("start")
            return Noted(start(*args))

        x = torch.randn(2, 4, 4, requires_grad=True)
        weight = torch.randn(6, 4, requires_grad=True)
        y = parallel_linear(
            x,
            weight,
            mode="column",
            group=dist.group.WORLD,
            gemm=gemm,
            sequence_parallel=sequence_parallel,
        )
        setattr(functional, name, noted)
        try:
            y.sum().backward()
        finally:
            setattr(functional, name, start)
        return gemm.calls

    expected = ["forward", "dgrad", "start", "wgrad", "wait"]
    assert ranks(2, body) == [expected, expected]


def test_without_a_group_the_layer_is_f_linear() -> None:
    layer = ColumnParallelLinear(4, 6)
    x = torch.randn(2, 3, 4, requires_grad=True)
    assert layer(x).grad_fn.name() == F.linear(x, layer.weight).grad_fn.name()


def test_shapes_that_do_not_divide_name_both_numbers(ranks) -> None:
    def body() -> None:
        group = dist.group.WORLD
        with pytest.raises(
            ValueError, match=r"out_features\[1\] of \(2, 10\) is 10, which the 4 ranks.*8 or 12"
        ):
            ColumnParallelLinear(4, (2, 10), shard_dim=1, group=group)
        with pytest.raises(ValueError, match=r"in_features\[0\] of \(3,\) is 3.* work are 4"):
            RowParallelLinear(3, 4, group=group)
        row = RowParallelLinear(8, 4, group=group, sequence_parallel=True)
        with pytest.raises(
            ValueError, match=r"the sequence length is 6, which the 4 ranks.*4 or 8"
        ):
            row(torch.randn(1, 6, 2))
        with pytest.raises(ValueError, match=r"splits dim 1 of \[B, S, \.\.\.\], got x of shape"):
            row(torch.randn(6, 2))

    ranks(4, body)


def test_settings_out_of_range_are_named() -> None:
    with pytest.raises(ValueError, match=r"shard_dim must be 0 to 1 for \(2, 6\), got 2"):
        ColumnParallelLinear(4, (2, 6), shard_dim=2)
    with pytest.raises(ValueError, match="mode must be 'column' or 'row', got 'diagonal'"):
        parallel_linear(torch.ones(1, 2), torch.ones(3, 2), mode="diagonal")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="out_features must be one or more sizes"):
        ColumnParallelLinear(4, ())
    with pytest.raises(ValueError, match="in_features must be at least 1, got 0"):
        ColumnParallelLinear(0, 8)
    with pytest.raises(ValueError, match="out_features must be at least 1, got 0"):
        RowParallelLinear(8, 0)


def test_a_frozen_weight_keeps_no_input_and_computes_no_gradient(ranks) -> None:
    def body() -> None:
        gemm = DoublingGemm()
        x = torch.randn(2, 4, 4, requires_grad=True)
        y = parallel_linear(
            x, torch.randn(6, 4), mode="column", group=dist.group.WORLD, gemm=gemm,
        )  # fmt: skip
        assert [t.shape for t in y.grad_fn.saved_tensors] == [(6, 4)]
        y.sum().backward()
        assert gemm.calls == ["forward", "dgrad"]

    ranks(2, body)


def test_mixed_dtypes_are_named() -> None:
    layer = ColumnParallelLinear(4, 6, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"x is torch\.float32 and the weight torch\.bfloat16"):
        layer(torch.ones(1, 2, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.ones(1, 2, 4)).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_an_empty_sequence_is_named(ranks, kind: type[nn.Module]) -> None:
    def body() -> None:
        layer = kind(4, 4, group=dist.group.WORLD, sequence_parallel=True)
        width = 4 if kind is ColumnParallelLinear else 2
        with pytest.raises(ValueError, match=r"length is 0; the nearest size that 2 ranks .* is 2"):
            layer(torch.ones(1, 0, width))

    ranks(2, body)


def test_one_token_needs_no_leading_dim(ranks) -> None:
    def body() -> None:
        net = {}
        for group in (None, dist.group.WORLD):
            torch.manual_seed(0)
            layers = [kind(4, 4, group=group, bias=True, dtype=F64)
                      for kind in (ColumnParallelLinear, RowParallelLinear)]  # fmt: skip
            net[group] = nn.Sequential(*layers)
        grad = x = torch.randn(4, dtype=F64)
        expected, actual = _run(net[None], x, grad), _run(net[dist.group.WORLD], x, grad)
        own = dist.get_rank()
        for name in ("0.weight", "0.bias"):
            expected[name] = expected[name].chunk(2)[own]
        expected["1.weight"] = expected["1.weight"].chunk(2, 1)[own]
        for name, value in expected.items():
            _close(actual[name], value)

    ranks(2, body)


def test_no_tokens_at_all_are_fine_without_sequence_parallelism(ranks) -> None:
    """As an expert has that no token was sent to."""

    def body() -> None:
        net = nn.Sequential(
            *(
                kind(4, 4, group=dist.group.WORLD)
                for kind in (ColumnParallelLinear, RowParallelLinear)
            )
        )
        net(torch.ones(0, 4)).sum().backward()
        assert all(param.grad.eq(0).all() for param in net.parameters())

    ranks(2, body)
