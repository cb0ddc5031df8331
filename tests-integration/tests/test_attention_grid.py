"""An attention layer split over tensor and context ranks at once, against one rank's dense one.

The grid is tp x sequence parallelism x (cp x algorithm) x key/value groups x window x packing x
dtype. CI runs a seeded sample of the worlds up to 8 ranks; the campaign runs every cell.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mt_context_parallel import (
    AttentionMask,
    HierarchicalGroups,
    context_parallel_attention,
    shard,
)
from mt_parallel_state import (
    ParallelLayout,
    ParallelState,
    gather_from_group,
    scatter_to_group,
    sharding_of,
)
from mt_tensor_parallel import ColumnParallelLinear, RowParallelLinear, exchange_kv_groups
from torch import Tensor, nn

BATCH, LENGTH, HIDDEN, HEADS, HEAD_DIM = 2, 64, 16, 32, 8
DOCUMENTS = (0, 16, 64)
ALGORITHMS = ("ring", "all_gather", "ulysses", "hierarchical")
# Largest difference, relative to the largest element of each tensor (docs/mt-tensor-parallel.md).
BOUNDS = {torch.float64: 1e-10, torch.float32: 2e-5}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One way to split one attention layer."""

    tp: int
    sequence_parallel: bool
    cp: int
    algorithm: str
    groups: int
    window: int | None
    packed: bool
    dtype: torch.dtype


GRID = [
    Cell(
        tp=tp,
        sequence_parallel=sequence_parallel,
        cp=cp,
        algorithm=algorithm,
        groups=groups,
        window=window,
        packed=packed,
        dtype=dtype,
    )
    for tp, sequence_parallel in [(1, False), *itertools.product((2, 4, 8), (False, True))]
    for cp, algorithm in [(1, "ring"), *itertools.product((2, 4), ALGORITHMS)]
    for groups in (1, 4, 32)
    for window in (None, 7)
    for packed in (False, True)
    for dtype in BOUNDS
]


class SplitLayer(nn.Module):
    """Projection, attention and projection back, with two dims of parallelism."""

    def __init__(self, cell: Cell, state: ParallelState | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.state = cell, state
        self.exchanges = state is not None and cell.groups < cell.tp
        settings = {
            "group": None if state is None else state.group("tp"),
            "sequence_parallel": cell.sequence_parallel and state is not None,
            "bias": True,
            "dtype": torch.float64,
        }
        fused = (cell.groups, HEADS // cell.groups + 2, HEAD_DIM)
        dim = 2 if self.exchanges else 0
        self.qkv = ColumnParallelLinear(HIDDEN, fused, shard_dim=dim, **settings)
        self.out = RowParallelLinear((HEADS, HEAD_DIM), HIDDEN, **settings)
        self.to(cell.dtype if state is not None else torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        if self.exchanges:
            qkv = exchange_kv_groups(qkv, self.qkv.group)
        q, k, v = (part.flatten(2, 3) for part in qkv.split((qkv.shape[3] - 2, 1, 1), dim=3))
        return self.out(self.attend(q, k, v))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cell = self.cell
        if self.state is None:
            return dense_attention(q, k, v, cell)
        group = self.state.group("cp")
        if group is not None and cell.algorithm == "hierarchical":
            inner, outer = self.state.level_groups("cp", (2, cell.cp // 2))
            group = HierarchicalGroups(inner=inner, outer=outer)
        return context_parallel_attention(
            *(q, k, v),
            group=group,
            algorithm=cell.algorithm,
            mask=AttentionMask(window=cell.window),
            cu_seqlens=DOCUMENTS if cell.packed else None,
        )


def dense_attention(q: Tensor, k: Tensor, v: Tensor, cell: Cell) -> Tensor:
    """By torch, under a mask written out."""
    position = torch.arange(LENGTH)
    distance = position[:, None] - position
    allowed = distance >= 0
    if cell.window is not None:
        allowed &= distance < cell.window
    if cell.packed:
        ids = torch.bucketize(position, torch.tensor(DOCUMENTS[1:]), right=True)
        allowed &= ids[:, None] == ids
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, allowed, enable_gqa=True).transpose(1, 2)


def errors(cell: Cell, state: ParallelState) -> dict[str, float]:
    """Return the errors of this rank's output, input gradient and weight gradients."""
    dense, split = SplitLayer(cell, None), SplitLayer(cell, state)
    with torch.no_grad():
        for mine in dense.parameters():  # both start from values that the narrow dtype has
            mine.copy_(mine.to(cell.dtype))
    torch.manual_seed(1)
    x, grad = torch.randn(2, BATCH, LENGTH, HIDDEN, dtype=torch.float64).to(cell.dtype)

    def own(whole: Tensor) -> Tensor:
        cu_seqlens = DOCUMENTS if cell.packed else None
        part = shard(whole, state.group("cp"), cu_seqlens=cu_seqlens)
        if cell.sequence_parallel:
            part = scatter_to_group(part, state.group("tp"), dim=1)
        return part.detach().clone()

    whole = x.double().requires_grad_()
    y = dense(whole)
    y.backward(grad.double())
    part = own(x).requires_grad_()
    out = split(part)
    out.backward(own(grad))
    pairs = {"output": (out, own(y)), "input": (part.grad, own(whole.grad))}
    for (name, param), other in zip(split.named_parameters(), dense.parameters(), strict=True):
        pairs[name] = (whole_gradient(param, state), other.grad)
    result = {}
    for name, (actual, expected) in pairs.items():
        assert actual.dtype == cell.dtype
        difference = (actual.detach().double() - expected).abs().max() / expected.abs().max()
        result[name] = float(difference)
    return result


def whole_gradient(param: nn.Parameter, state: ParallelState) -> Tensor:
    """The parameter's gradient over all ranks' tokens and all its shards."""
    grad, record = param.grad, sharding_of(param)
    if state.group("cp") is not None:
        dist.all_reduce(grad, group=state.group("cp"))
    if record.partial_grad and state.group("tp") is not None:
        dist.all_reduce(grad, group=state.group("tp"))
    for dim, axes in enumerate(record.spec.dims):
        if axes:
            grad = gather_from_group(grad, state.group("tp"), dim=dim)
    return grad


def check(ranks, cells: list[Cell]) -> None:
    worlds = defaultdict(list)
    for cell in cells:
        worlds[cell.tp, cell.cp].append(cell)
    for (tp, cp), here in worlds.items():

        def body(tp=tp, cp=cp, here=here) -> list[dict[str, float]]:
            state = ParallelState(ParallelLayout(tp=tp, cp=cp))
            return [errors(cell, state) for cell in here]

        for of_rank in ranks(tp * cp, body, timeout=300):
            for cell, found in zip(here, of_rank, strict=True):
                assert max(found.values()) < BOUNDS[cell.dtype], (cell, found)


def test_a_sample_of_the_grid_agrees_with_one_rank(ranks) -> None:
    small = [cell for cell in GRID if cell.tp * cell.cp <= 8]
    check(ranks, random.Random(3).sample(small, 24))


@pytest.mark.campaign
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_the_whole_grid_agrees_with_one_rank(ranks, tp: int, cp: int) -> None:
    check(ranks, [cell for cell in GRID if (cell.tp, cell.cp) == (tp, cp)])
