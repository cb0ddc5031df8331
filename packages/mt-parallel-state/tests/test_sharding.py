"""Sharding records of a whole module, which outlive its parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from mt_parallel_state import (
    ParallelLayout,
    ParamSharding,
    PartitionSpec,
    global_shape_of,
    shard_param,
    sharding_of,
    shardings,
)
from torch import nn

COLUMN = PartitionSpec("tp")


class Block(nn.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.up = nn.Linear(4, 8, device=device)
        self.norm = nn.RMSNorm(4, device=device)
        shard_param(self.up.weight, COLUMN)
        shard_param(self.up.bias, COLUMN)
        shard_param(self.norm.weight, PartitionSpec(), partial_grad=("tp",))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.norm(x)).sum()


RECORDS = {
    "up.weight": ParamSharding(COLUMN),
    "up.bias": ParamSharding(COLUMN),
    "norm.weight": ParamSharding(partial_grad=("tp",)),
}


def test_a_module_answers_for_its_parameters_by_name() -> None:
    assert shardings(Block()) == RECORDS
    assert shardings(nn.Sequential(Block()))["0.up.weight"] == ParamSharding(COLUMN)
    assert shardings(nn.Linear(2, 2)) == {"weight": ParamSharding(), "bias": ParamSharding()}
    with pytest.raises(TypeError, match="module must be a Module, got 3"):
        shardings(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "renew",
    [
        copy.deepcopy,
        lambda module: module.to_empty(device="cpu"),
        lambda module: module.to(torch.float64),
        lambda module: nn.Sequential(copy.deepcopy(module))[0],
    ],
    ids=["deepcopy", "to_empty", "to", "moved"],
)
def test_records_survive_new_parameters(renew: Callable[[nn.Module], nn.Module]) -> None:
    module = Block("meta" if renew.__name__ != "deepcopy" else "cpu")
    shardings(module)
    fresh = renew(module)
    assert shardings(fresh) == RECORDS
    for name, param in fresh.named_parameters():
        assert sharding_of(param) == RECORDS[name]


def test_the_copy_of_a_module_has_a_table_of_its_own() -> None:
    module = Block()
    shardings(module)
    other = copy.deepcopy(module)
    shard_param(other.up.weight, PartitionSpec(None, "tp"))
    assert shardings(other)["up.weight"] == ParamSharding(PartitionSpec(None, "tp"))
    assert shardings(module) == RECORDS


def test_a_record_of_the_parameter_wins_over_the_table() -> None:
    module = Block()
    shardings(module)
    module.up.weight = shard_param(nn.Parameter(torch.zeros(8, 4)), PartitionSpec(None, "tp"))
    assert shardings(module)["up.weight"].spec == PartitionSpec(None, "tp")


def test_tied_parameters_are_named_in_both_places() -> None:
    module = nn.ModuleDict({"a": Block(), "b": Block()})
    module["b"].up = module["a"].up
    assert shardings(module)["b.up.weight"] == ParamSharding(COLUMN)


def test_records_survive_fully_shard(ranks) -> None:
    def body() -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        module = Block()
        shardings(module)
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        assert all(type(p.data).__name__ == "DTensor" for p in module.parameters())
        assert not any(hasattr(p, "_mt_sharding") for p in module.parameters())
        module(torch.ones(2, 4)).backward()
        assert shardings(module) == RECORDS
        weight = module.up.weight
        assert sharding_of(weight) == ParamSharding(COLUMN)
        # Split over tp by us, and over the ranks of the mesh by FSDP.
        assert global_shape_of(weight, ParallelLayout(tp=2)) == (16, 4)

    ranks(2, body)
