"""mt-quant on layers split over ranks, against one rank with the whole weight."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mt_parallel_state import gather_from_group, scatter_to_group, sharding_of, shardings
from mt_quant import QuantizationConfig, QuantizationError, QuantizedLinear, Rule, quantize
from mt_tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

HIDDEN, FFN = 32, 64


class PlainMLP(nn.Module):
    """The split dims are the first of the outputs' and of the inputs'."""

    ffn, dim = (FFN,), 0

    def __init__(self, group: dist.ProcessGroup | None, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        common = {"group": group, "sequence_parallel": sequence_parallel}
        self.up = ColumnParallelLinear(HIDDEN, (2, *self.ffn), shard_dim=1 + self.dim, **common)
        self.down = RowParallelLinear(self.ffn, HIDDEN, shard_dim=self.dim, **common)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(F.silu(up.select(2, 0)) * up.select(2, 1))


class FusedMLP(PlainMLP):
    """Dims on both sides of the split one."""

    ffn, dim = (2, 2, FFN // 4), 1


def _config(weight: str, input: str | None) -> QuantizationConfig:
    return QuantizationConfig(rules=(Rule(weight=weight, input=input),))


def _made(kind: type[PlainMLP], group: dist.ProcessGroup | None, *, sequence: bool) -> nn.Module:
    torch.manual_seed(0)
    return kind(group, sequence_parallel=sequence)


def _run(model: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(grad)
    assert x.grad is not None
    return y.detach(), x.grad


SCHEMES = [
    ("int8", None),
    ("int8-tensor", None),
    ("int4-g8", None),
    ("int4-g8-asym", None),
    ("int8", "int8"),
    ("int8", "int8-tensor"),
    ("int8", "int8-static"),
    ("fp8", "fp8"),
    ("fp8", "fp8-static"),
    ("nvfp4", "nvfp4"),
]
HOW = [(kind, sequence) for kind in (PlainMLP, FusedMLP) for sequence in (False, True)]


@pytest.mark.parametrize(
    ("weight", "input", "kind", "sequence"),
    [
        # Each scheme once, and each kind of layer several times.
        pytest.param(*scheme, *how, marks=() if i % 4 == j else pytest.mark.campaign)
        for i, scheme in enumerate(SCHEMES)
        for j, how in enumerate(HOW)
    ],
)
def test_split_layers_hold_the_parts_of_what_one_rank_holds(
    ranks, kind: type[PlainMLP], weight: str, input: str | None, sequence: bool
) -> None:
    def body() -> None:
        group = dist.group.WORLD
        config = _config(weight, input)
        batches = list(torch.randn(2, 3, 4, HIDDEN))
        whole = quantize(_made(kind, None, sequence=False), config, batches)
        if sequence:
            batches = [scatter_to_group(batch, group, dim=1) for batch in batches]
        split = quantize(_made(kind, group, sequence=sequence), config, batches)
        for name in ("up", "down"):
            one, part = getattr(whole, name), getattr(split, name)
            assert isinstance(part, QuantizedLinear)
            own = one.quantized_weight.take(*part.shape.own(torch.device("cpu")))
            assert torch.equal(part.quantized_weight.data, own.data)
            assert torch.equal(part.quantized_weight.scale, own.scale)
            if one.input_step is not None:
                torch.testing.assert_close(part.input_step, one.input_step)
            for key, record in shardings(part).items():
                dims = [dim for dim, axes in enumerate(record.spec.dims) if axes]
                if key.startswith("weight_") and dims:
                    boxes = gather_from_group(getattr(part, key).detach(), group, dim=dims[0])
                    assert torch.equal(boxes.flatten(), getattr(one, key).flatten())
        x, grad = torch.randn(2, 3, 4, HIDDEN)
        expected = _run(whole, x, grad)
        if sequence:
            x, grad = (scatter_to_group(t, group, dim=1) for t in (x, grad))
        actual = _run(split, x, grad)
        if sequence:
            actual = tuple(gather_from_group(t, group, dim=1) for t in actual)
        for got, wanted in zip(actual, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)

    ranks(2, body)


def test_fused_weights_keep_a_dim_for_each_part(ranks) -> None:
    def body() -> None:
        split = quantize(
            _made(FusedMLP, dist.group.WORLD, sequence=False), _config("int4-g8", None)
        )
        assert split.up.weight_data.shape == (2, 2, 1, FFN // 4, HIDDEN // 2)
        assert split.up.weight_scale.shape == (2, 2, 1, FFN // 4, HIDDEN // 8)
        assert sharding_of(split.up.weight_scale).spec.dims == ((), (), ("tp",))
        assert split.down.weight_data.shape == (HIDDEN, 2, FFN // 4 // 2)
        assert split.down.weight_scale.shape == (HIDDEN, 2, 2)
        assert sharding_of(split.down.weight_data).spec.dims == ((), (), ("tp",))

    ranks(2, body)


def test_a_split_copy_keeps_its_shape_and_its_collectives(ranks) -> None:
    def body() -> None:
        model = _made(PlainMLP, dist.group.WORLD, sequence=False)
        shardings(model)
        quantized = quantize(model, _config("int8", None))
        x = torch.randn(2, 4, HIDDEN)
        twin = _made(PlainMLP, dist.group.WORLD, sequence=False)
        twin = quantize(twin, _config("int8", None))
        with torch.no_grad():
            twin.down.weight_data.zero_()
        twin.load_state_dict(copy.deepcopy(quantized.state_dict()))
        assert torch.equal(twin(x), quantized(x))

    ranks(2, body)


def test_groups_that_the_ranks_cut_are_refused_before_anything_changes(ranks) -> None:
    def body() -> None:
        model = _made(FusedMLP, dist.group.WORLD, sequence=False)
        with pytest.raises(QuantizationError, match="down: groups of 32 inputs are cut"):
            quantize(model, _config("int4-g32", None))
        with pytest.raises(QuantizationError, match="down: groups of 32 inputs are cut"):
            quantize(model, _config("int8", "mxfp8"))
        assert isinstance(model.up, ColumnParallelLinear)

    ranks(2, body)
