"""Adapters on split layers train, merge and export like adapters on whole ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mt_parallel_state import MatrixSpec, gather_from_group, mark_matrix, sharding_of
from mt_tensor_parallel import (
    ColumnParallelLinear,
    LoraAdapter,
    LoraOptions,
    RowParallelLinear,
    adapter_of,
    add_lora,
    lora_state,
    recompute,
    save_lora,
    set_lora_step,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


def adapted(
    group: dist.ProcessGroup | None, *, sequence_parallel: bool = False, dropout: float = 0.0
) -> MLP:
    torch.manual_seed(0)
    net = MLP(group, sequence_parallel=sequence_parallel)
    torch.manual_seed(0 if group is None else group.rank())  # adapters do not ask for equal seeds
    assert add_lora(net, 3, alpha=6.0, dropout=dropout) == ["up", "down"]
    ranks = 1 if group is None else group.size()
    pairs = ((net.up.lora, 1), (net.down.lora, None))
    for layer, dim in pairs:  # B starts at zero: give it values
        generator = torch.Generator().manual_seed(7)
        shape = list(layer.b.shape)
        if dim is not None:
            shape[dim] *= ranks
        whole = torch.randn(shape, generator=generator, dtype=F64)
        if dim is not None and group is not None:
            whole = whole.chunk(ranks, dim)[group.rank()]
        layer.b.data.copy_(whole)
    return net


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_split_adapters_train_like_whole_ones(
    ranks, sequence_parallel: bool, dropout: float
) -> None:
    def body() -> None:
        group, rank = dist.group.WORLD, dist.get_rank()
        dense = adapted(None, dropout=dropout)
        split = adapted(group, sequence_parallel=sequence_parallel, dropout=dropout)
        for name, whole in lora_state(dense).items():
            torch.testing.assert_close(lora_state(split)[name], whole, rtol=0, atol=0)
        x = torch.randn(2, 4, 6, dtype=F64, generator=torch.Generator().manual_seed(1))
        a = x.clone().requires_grad_()
        b = (x.chunk(2, 1)[rank] if sequence_parallel else x).clone().requires_grad_()
        for net in (dense, split):
            set_lora_step(net, 5)
        torch.manual_seed(100 * rank)  # no generator counts
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
        before, weight = net(x), net.up.weight.clone()
        for layer in (net.up, net.down):
            layer.lora.merge()
            layer.lora.merge()
        torch.testing.assert_close(net(x), before, rtol=1e-10, atol=1e-12)
        assert not torch.equal(net.up.weight, weight)
        net.up.lora.unmerge()
        torch.testing.assert_close(net.up.weight, weight, rtol=1e-12, atol=1e-12)

    ranks(2, body)


def test_an_adapter_starts_as_its_base_and_draws_one_matrix_for_any_split(ranks) -> None:
    def body() -> Tensor:
        torch.manual_seed(dist.get_rank())
        net = nn.ModuleDict({"a": RowParallelLinear(8, 6, group=dist.group.WORLD)})
        x = torch.randn(1, 3, 4)
        before = net["a"](x)
        add_lora(net, 2, seed=3)
        assert torch.equal(net["a"](x), before)
        return lora_state(net)["base_model.model.a.lora_A.weight"]

    first, second = ranks(2, body)

    def drawn(**other) -> Tensor:
        return LoraAdapter(
            RowParallelLinear(8, 6), LoraOptions(rank=2, seed=other["seed"]), name=other["name"]
        ).a

    alone = drawn(seed=3, name="a")
    assert torch.equal(first, second)
    assert torch.equal(first, alone)
    assert 0.3 < alone.abs().max() <= 8**-0.5  # uniform up to 1 / sqrt(in)
    for other in ({"seed": 4, "name": "a"}, {"seed": 3, "name": "b"}):
        assert not torch.equal(drawn(**other), alone)


def test_dropout_is_that_of_its_step_also_when_recomputed() -> None:
    net = adapted(None, dropout=0.5)
    x = torch.randn(2, 4, 6, dtype=F64, generator=torch.Generator().manual_seed(1))
    with pytest.raises(RuntimeError, match="set_lora_step"):
        net(x)

    def gradients(run, step: int = 3) -> list[Tensor]:
        net.zero_grad()
        set_lora_step(net, step)
        inputs = x.clone().requires_grad_()
        run(inputs).square().sum().backward()
        return [inputs.grad, net.up.lora.a.grad, net.down.lora.a.grad]

    expected = gradients(net)
    for again in (
        net,
        lambda inputs: recompute(net, inputs),
        lambda inputs: checkpoint(net, inputs, use_reentrant=False),
    ):
        assert all(map(torch.equal, gradients(again), expected))
    assert not torch.equal(gradients(net, step=4)[0], expected[0])
    ones = torch.ones(40, 50, 6, dtype=F64)
    dropped = net.up.lora._drop(ones)
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert dropped.mean().item() == pytest.approx(1, abs=0.05)
    net.eval()
    assert torch.equal(net(x), net(x))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_layouts_drop_the_same_elements(ranks, sequence_parallel: bool) -> None:
    def body() -> None:
        group, rank = dist.group.WORLD, dist.get_rank()
        torch.manual_seed(rank)
        dense = adapted(None, dropout=0.5)
        split = adapted(group, sequence_parallel=sequence_parallel, dropout=0.5)
        for net in (dense, split):
            set_lora_step(net, 8)
        up, down = torch.ones(2, 4, 6, dtype=F64), torch.ones(2, 4, 8, dtype=F64)
        mask = dense.up.lora._drop(up)
        expected = mask.chunk(2, 1)[rank] if sequence_parallel else mask
        assert torch.equal(split.up.lora._drop(torch.ones_like(expected)), expected)
        mask = dense.down.lora._drop(down).chunk(2, -1)[rank]
        assert torch.equal(split.down.lora._drop(torch.ones_like(mask)), mask)

    ranks(2, body)


def test_adapters_of_several_calls_live_side_by_side() -> None:
    net = MLP(None, sequence_parallel=False)
    assert add_lora(net, 8, matches=lambda name: name == "up") == ["up"]
    assert add_lora(net, 4) == ["down"]
    assert [net.up.lora.rank, net.down.lora.rank] == [8, 4]
    trained = {name for name, param in net.named_parameters() if param.requires_grad}
    assert trained == {"up.lora.a", "up.lora.b", "down.lora.a", "down.lora.b"}
    with pytest.raises(ValueError, match="matches that has no adapter yet"):
        add_lora(net, 4)


def test_a_layer_of_two_names_gets_one_adapter_under_both() -> None:
    net = nn.ModuleDict({"one": ColumnParallelLinear(4, 4)})
    net["two"] = net["one"]
    net["three"] = nn.Sequential(net["one"])
    assert add_lora(net, 2, matches=lambda name: name == "two") == ["one"]
    assert net["one"] is net["two"] is net["three"][0]
    assert adapter_of(net["one"]) is not None
    assert list(lora_state(net)) == [
        "base_model.model.one.lora_A.weight",
        "base_model.model.one.lora_B.weight",
    ]


def test_a_state_dict_says_whether_the_adapter_is_in_the_weight() -> None:
    net, other = adapted(None), adapted(None)
    x = torch.randn(2, 4, 6, dtype=F64, generator=torch.Generator().manual_seed(1))
    expected = net(x)
    net.up.lora.merge()
    other.load_state_dict(net.state_dict())
    assert (other.up.lora.merged, other.down.lora.merged) == (True, False)
    torch.testing.assert_close(other(x), expected, rtol=1e-10, atol=1e-12)
    net.up.lora.unmerge()
    other.load_state_dict(net.state_dict())
    torch.testing.assert_close(other(x), expected, rtol=1e-10, atol=1e-12)


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
    torch.testing.assert_close(scale * product, net.up.lora.delta().flatten(0, 1))


@pytest.mark.parametrize("layer", ["column", "row"])
def test_layers_of_one_feature_per_rank_are_saved(ranks, tmp_path: Path, layer: str) -> None:
    def body() -> None:
        from safetensors.torch import load_file

        group, rank = dist.group.WORLD, dist.get_rank()
        made = ColumnParallelLinear(6, 2, group=group) if layer == "column" else None
        net = nn.Sequential(made or RowParallelLinear(2, 6, group=group))
        add_lora(net, 3)
        nn.init.ones_(net[0].lora.b)
        save_lora(net, tmp_path, base_model="m", write=rank == 0)
        dist.barrier()
        state = load_file(str(tmp_path / "adapter_model.safetensors"))
        a, b = (state[f"base_model.model.0.lora_{x}.weight"] for x in "AB")
        whole = gather_from_group(net[0].lora.delta(), group, dim=int(layer == "row"))
        torch.testing.assert_close(b @ a, whole.detach())

    ranks(2, body)


def test_a_fused_layer_is_exported_as_the_layers_it_stands_for(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    def export(name: str, a: Tensor, b: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        if name == "down":
            return {"layer.down_proj": (a, b)}
        return {"layer.gate_proj": (a, b[0]), "layer.up_proj": (a, b[1])}

    net = adapted(None)
    save_lora(net, tmp_path, base_model="some/model", export=export)
    state = load_file(str(tmp_path / "adapter_model.safetensors"))
    for part, name in enumerate(("gate_proj", "up_proj")):
        prefix = f"base_model.model.layer.{name}"
        product = state[f"{prefix}.lora_B.weight"] @ state[f"{prefix}.lora_A.weight"]
        torch.testing.assert_close(2 * product, net.up.lora.delta()[part])
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "gate_proj", "up_proj"]


def test_layers_without_adapters_are_no_target_of_their_names(tmp_path: Path) -> None:
    net = nn.ModuleList([MLP(None, sequence_parallel=False) for _ in range(2)])
    add_lora(net, 2, matches=lambda name: name in ("0.up", "1.up"))
    save_lora(net, tmp_path / "all", base_model="m")
    net = nn.ModuleList([MLP(None, sequence_parallel=False) for _ in range(2)])
    add_lora(net, 2, matches=lambda name: name == "1.up")
    save_lora(net, tmp_path / "one", base_model="m")
    save_lora(net, tmp_path / "given", base_model="m", target_modules=["x"])
    for folder, targets in (("all", ["up"]), ("one", ["1.up"]), ("given", ["x"])):
        config = json.loads((tmp_path / folder / "adapter_config.json").read_text())
        assert config["target_modules"] == targets


def test_parts_of_a_fused_layer_have_adapters_of_their_own(ranks) -> None:
    def body() -> None:
        group, rank = dist.group.WORLD, dist.get_rank()
        x = torch.randn(2, 4, 6, dtype=F64, generator=torch.Generator().manual_seed(1))
        for parts in ((0, 1), (1,)):
            nets: list[ColumnParallelLinear] = []
            for own in (None, group):
                torch.manual_seed(0)
                layer = ColumnParallelLinear(6, (2, 8), shard_dim=1, group=own, dtype=F64)
                mark_matrix(layer.weight, MatrixSpec(part_dim=0, parts=(1, 1)))
                LoraAdapter(layer, LoraOptions(rank=3, alpha=6), name="up", parts=parts)
                whole = torch.randn(len(parts), 8, 3, dtype=F64)
                layer.lora.b.data.copy_(whole if own is None else whole.chunk(2, 1)[rank])
                nets.append(layer)
            dense, split = nets
            assert dense.lora.a.shape == (len(parts), 3, 6)
            expected = torch.zeros(2, 4, 2, 8, dtype=F64)
            for place, part in enumerate(parts):
                b, a = dense.lora.b[place], dense.lora.a[place]
                expected[..., part, :] = 2 * x @ a.T @ b.T
            plain = dense._apply_linear(x, None, dense.bias.flatten()).unflatten(-1, (2, 8))
            torch.testing.assert_close(dense(x), plain + expected, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(
                split(x), dense(x).chunk(2, -1)[rank], rtol=1e-10, atol=1e-12
            )
            before = dense(x)
            dense.lora.merge()
            torch.testing.assert_close(dense(x), before, rtol=1e-10, atol=1e-12)
            with pytest.raises(ValueError, match="of parts or experts"):
                lora_state(nn.ModuleDict({"up": dense}))

    ranks(2, body)


def test_what_does_not_fit_is_named() -> None:
    layer = ColumnParallelLinear(4, 4)
    for rank in (0, -1):
        with pytest.raises(ValueError, match=rf"rank={rank} must be at least 1 and dropout=0.0 in"):
            add_lora(layer, rank)
    assert add_lora(layer, 2) == [""]
    with pytest.raises(ValueError, match="has an adapter already"):
        LoraAdapter(layer, LoraOptions(rank=2))
    with pytest.raises(ValueError, match="no ColumnParallelLinear, RowParallelLinear or layer of"):
        add_lora(nn.Linear(2, 2), 2)
    with pytest.raises(ValueError, match="the module has no adapter"):
        save_lora(nn.Linear(2, 2), "x", base_model="m", target_modules=[])
