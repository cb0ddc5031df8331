"""Bytes of each rank, measured, against the formulas, and the documented table of them."""

import re
from pathlib import Path

import pytest
import torch
from mt_data_parallel import grad_of, shard
from mt_optim import DistributedOptimizer, OptimizerConfig, build_optimizer
from mt_parallel_state import ParallelLayout, ParallelState
from torch import nn

PAGE = Path(__file__).parents[3] / "docs" / "mt-optim.md"
SIZE, LAYERS = 256, 4


def rows():
    """Read the table: weights, strategy, settings, formulas, and bytes at 2 and at 4 ranks."""
    section = PAGE.read_text().split("### Bytes per parameter\n")[1].split("\n#")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]


def value(formula, d):
    """Compute `a`, `b/d` or `a + b/d`."""
    total = 0.0
    for term in formula.split("+"):
        number, _, shared = term.strip().partition("/")
        assert shared in ("", "d")
        total += float(number) / (d if shared else 1)
    return total


def options(text):
    """Read settings such as `moments_dtype bf16, offload 0.5`."""
    pairs = (pair.split() for pair in text.split(", ") if pair != "-")
    return {key: float(value) if key == "offload" else value for key, value in pairs}


def measured(world, dtype, strategy, settings):
    """Return bytes per parameter after a step: of all storages, and of host storages."""
    with ParallelState(ParallelLayout(dp=world)) as state:
        layers = [nn.Linear(SIZE, SIZE, dtype=dtype) for _ in range(LAYERS)]
        model = nn.Sequential(nn.ModuleList(layers))
        model.forward = lambda x: [x := layer(x) for layer in layers][-1]
        count = sum(param.numel() for param in model.parameters())
        with shard(model, strategy, group=state.group("dp"), bucket_size=SIZE**2) as buffer:
            scale = 1024.0 if dtype == torch.float16 else None
            config = OptimizerConfig(lr=1e-3, loss_scale=scale, **settings)
            optimizer = DistributedOptimizer(buffer, lambda p: build_optimizer(p, config, state))
            buffer.start(1)
            model(torch.ones(2, SIZE, dtype=dtype)).float().square().mean().backward()
            buffer.finish()
            optimizer.step()
            inner = optimizer.inner
            params = [*model.parameters(), *(piece.param for piece in optimizer.shards)]
            here = [*params, *(grad_of(param) for param in params)]
            there = []
            for piece in optimizer.shards:
                kept = inner.state[piece.param].values()
                (there if inner._storage.is_offloaded(piece) else here).extend(kept)
            return _bytes(here) / count, _bytes(there) / count


def _bytes(tensors):
    storages = (tensor.untyped_storage() for tensor in tensors if tensor is not None)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("row", rows(), ids=lambda row: "-".join(row[:3]).replace(" ", "-"))
def test_bytes_of_a_parameter_are_those_of_the_table(ranks, row):
    weights, strategy, settings, device, host, *seen = row
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}[weights]
    found = []
    for world in (2, 4):
        results = ranks(world, measured, world, dtype, strategy, options(settings))
        for here, there in results:
            assert here == pytest.approx(value(device, world), rel=0.05)
            assert there == pytest.approx(value(host, world), rel=0.05, abs=1e-3)
        found.append(sum(here for here, _ in results) / world)
    assert [f"{bytes_:.1f}" for bytes_ in found] == seen


def test_the_table_has_every_strategy():
    table = rows()
    assert {row[1] for row in table} == {"none", "optimizer", "optimizer_gradients", "full"}
    assert re.search(r"\b18\b", table[0][3])
