"""Adapters on split layers train, merge and export like adapters on whole ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mt_parallel_state import sharding_of
from mt_tensor_parallel import (
    ColumnParallelLinear,
    LoraLinear,
    RowParallelLinear,
    add_lora,
    gather_from_group,
    lora_state,
    save_lora,
)
from torch import Tensor, nn

F64 = torch.float64


class MLP(nn.Module):
    def __init__(self, group: dist.ProcessGroup | None, *, sequence_parallel: bool) -> None:
        super().__init__()
        options = {"group": group, "sequence_parallel": sequence_parallel, "dtype": F64}
        self.up = ColumnParallelLinear(6, (2, 8), shard_dim=1, bias=True, **options)
        self.down = RowParallelLinear(8, 6, **options)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).unbind(-2)
        return self.down(F.silu(gate) * value)


def adapted(group: dist.ProcessGroup | None, *, sequence_parallel: bool = False) -> MLP:
    torch.manual_seed(0)
    net = MLP(group, sequence_parallel=sequence_parallel)
    assert add_lora(net, 3, alpha=6.0) == ["up", "down"]
    ranks = 1 if group is None else group.size()
    for layer, dim in ((net.up, 1), (net.down, None)):  # B starts at zero: give it values
        generator = torch.Generator().manual_seed(7)
        shape = list(layer.b.shape)
        if dim is not None:
            shape[dim] *= ranks
        whole = torch.randn(shape, generator=generator, dtype=F64)
        if dim is not None and group is not None:
            whole = whole.chunk(ranks, dim)[group.rank()]
        layer.b.data.copy_(whole)
    return net


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_split_adapters_train_like_whole_ones(ranks, sequence_parallel: bool) -> None:
    def body() -> None:
        group, rank = dist.group.WORLD, dist.get_rank()
        dense, split = adapted(None), adapted(group, sequence_parallel=sequence_parallel)
        for name, whole in lora_state(dense).items():
            torch.testing.assert_close(lora_state(split)[name], whole, rtol=0, atol=0)
        x = torch.randn(2, 4, 6, dtype=F64, generator=torch.Generator().manual_seed(1))
        a = x.clone().requires_grad_()
        b = (x.chunk(2, 1)[rank] if sequence_parallel else x).clone().requires_grad_()
        expected, actual = dense(a), split(b)
        expected.square().sum().backward()
        actual.square().sum().backward()
        if sequence_parallel:
            expected, want = expected.chunk(2, 1)[rank], a.grad.chunk(2, 1)[rank]
        else:
            want = a.grad
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(b.grad, want, rtol=1e-10, atol=1e-12)
        wanted = dict(dense.named_parameters())
        for name, param in split.named_parameters():
            if not param.requires_grad:
                assert param.grad is None
                continue
            record, grad = sharding_of(param), param.grad
            if record.partial_grad:
                assert sequence_parallel
                dist.all_reduce(grad)
            dim = next((i for i, axes in enumerate(record.spec.dims) if axes), None)
            if dim is not None:
                grad = gather_from_group(grad, group, dim=dim)
            torch.testing.assert_close(grad, wanted[name].grad, rtol=1e-10, atol=1e-12)

    ranks(2, body)


def test_a_merged_adapter_is_in_the_weight_and_comes_out_again(ranks) -> None:
    def body() -> None:
        net = adapted(dist.group.WORLD)
        x = torch.randn(2, 4, 6, dtype=F64, generator=torch.Generator().manual_seed(1))
        before, weight = net(x), net.up.base.weight.clone()
        for layer in (net.up, net.down):
            layer.merge()
            layer.merge()
        torch.testing.assert_close(net(x), before, rtol=1e-10, atol=1e-12)
        assert not torch.equal(net.up.base.weight, weight)
        net.up.unmerge()
        torch.testing.assert_close(net.up.base.weight, weight, rtol=1e-12, atol=1e-12)

    ranks(2, body)


def test_an_adapter_starts_as_its_base_and_draws_one_matrix_for_any_split(ranks) -> None:
    def body() -> Tensor:
        torch.manual_seed(3)
        layer = LoraLinear(RowParallelLinear(8, 6, group=dist.group.WORLD), 2)
        x = torch.randn(1, 3, 4)
        assert torch.equal(layer(x), layer.base(x))
        return lora_state(nn.ModuleDict({"a": layer}))["base_model.model.a.lora_A.weight"]

    first, second = ranks(2, body)
    torch.manual_seed(3)
    alone = LoraLinear(RowParallelLinear(8, 6), 2).a
    assert torch.equal(first, second)
    assert torch.equal(first, alone)


def test_the_exported_files_have_the_names_and_shapes_of_peft(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    net = adapted(None)
    save_lora(net, tmp_path, base_model="some/model", target_modules=["up", "down"])
    state = load_file(str(tmp_path / "adapter_model.safetensors"))
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        "base_model.model.up.lora_A.weight": (3, 6),
        "base_model.model.up.lora_B.weight": (16, 3),
        "base_model.model.down.lora_A.weight": (3, 8),
        "base_model.model.down.lora_B.weight": (6, 3),
    }
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (3, 6.0, "LORA")
    scale = config["lora_alpha"] / config["r"]
    product = (
        state["base_model.model.up.lora_B.weight"] @ state["base_model.model.up.lora_A.weight"]
    )
    torch.testing.assert_close(scale * product, net.up.delta().flatten(0, 1))


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"rank=0 must be at least 1 and dropout=0.0 in \[0, 1\)"):
        LoraLinear(ColumnParallelLinear(4, 4), 0)
    with pytest.raises(ValueError, match="LoRA needs a base with communicate=True"):
        LoraLinear(ColumnParallelLinear(4, 4, skip_bias_add=True), 2)
    with pytest.raises(ValueError, match="no ColumnParallelLinear or RowParallelLinear"):
        add_lora(nn.Linear(2, 2), 2)
    with pytest.raises(ValueError, match="the module has no adapter"):
        save_lora(nn.Linear(2, 2), "x", base_model="m", target_modules=[])
