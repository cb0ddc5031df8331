"""Every way to hide communication gives the numbers of the plain one."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from mt_tensor_parallel import (
    ColumnParallelLinear,
    Overlap,
    RowParallelLinear,
    TorchGemm,
)
from mt_tensor_parallel.overlap import pick_overlap
from torch import Tensor


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("chunks", [2, 3, 16])
def test_pieces_give_the_numbers_of_the_whole(ranks, world: int, chunks: int) -> None:
    def run(overlap: Overlap) -> list[Tensor]:
        options = {
            "group": dist.group.WORLD, "sequence_parallel": True, "bias": True,
            "dtype": torch.float64, "overlap": overlap,
        }  # fmt: skip
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            ColumnParallelLinear(6, 8, **options), RowParallelLinear(8, 6, **options)
        )
        torch.manual_seed(1 + dist.get_rank())
        x = torch.randn(3, 5, 6, dtype=torch.float64, requires_grad=True)
        y = net(x)
        y.square().sum().backward()
        return [y.detach(), x.grad, *(param.grad for param in net.parameters())]

    def body() -> None:
        for a, b in zip(run(Overlap(kind="chunked", chunks=chunks)), run(Overlap()), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)

    ranks(world, body)


class NotingGemm(TorchGemm):
    def __init__(self, events: list[str]) -> None:
        self.events = events

    def __repr__(self) -> str:
        return "NotingGemm()"

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self.events.append("multiply")
        return super().forward(x, weight, bias)


def test_a_piece_travels_while_the_one_before_is_multiplied(ranks) -> None:
    def body() -> list[str]:
        from mt_tensor_parallel import overlap

        events: list[str] = []
        start = overlap.start_all_gather

        def noted(*arguments):
            events.append("send")
            return start(*arguments)

        overlap.start_all_gather = noted
        try:
            product = overlap.Product(NotingGemm(events), torch.ones(2, 2))
            way = Overlap(kind="chunked", chunks=2)
            overlap.gather_and(product, torch.ones(1, 4, 2), dist.group.WORLD, way, keep=False)
        finally:
            overlap.start_all_gather = start
        return events

    assert ranks(2, body) == [["send", "send", "multiply", "multiply"]] * 2


def test_the_gathered_input_is_put_together_only_where_it_is_kept(ranks) -> None:
    def body() -> None:
        from mt_tensor_parallel import overlap

        product = overlap.Product(TorchGemm(), torch.randn(2, 2, dtype=torch.float64))
        x = torch.randn(3, 4, 2, dtype=torch.float64) + dist.get_rank()
        way, interleaved, made = Overlap(kind="chunked", chunks=2), overlap._interleaved, []
        overlap._interleaved = lambda *arguments: made.append(1) or interleaved(*arguments)
        try:
            kept = overlap.gather_and(product, x, dist.group.WORLD, way, keep=True)
            assert len(made) == 2
            y, whole = overlap.gather_and(product, x, dist.group.WORLD, way, keep=False)
            assert len(made) == 3
        finally:
            overlap._interleaved = interleaved
        assert whole is None
        assert torch.equal(y, kept[0])
        torch.testing.assert_close(product(kept[1]), y, rtol=1e-12, atol=1e-12)

    ranks(2, body)


@pytest.mark.parametrize("is_dgrad", [False, True])
def test_symmetric_products_are_asked_for_what_the_plain_way_computes(
    ranks, is_dgrad: bool
) -> None:
    """With torch's own reference of its fused products standing in for the CUDA kernels."""

    def body() -> None:
        from mt_tensor_parallel.overlap import Product, gather_and, scatter_after
        from torch.distributed import _symmetric_memory as symmetric
        from torch.library import _scoped_library

        group, rank = dist.group.WORLD, dist.get_rank()
        torch.manual_seed(0)
        product = Product(TorchGemm(), torch.randn(4, 4, dtype=torch.float64), None, is_dgrad)
        x = torch.randn(3, 8, 4, dtype=torch.float64) + rank
        with _scoped_library("symm_mem", "IMPL") as library:
            for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
                library.impl(name, getattr(symmetric, f"_{name}_fallback"), "CPU")
            for function in (partial(gather_and, keep=True), scatter_after):
                ours = function(product, x, group, Overlap(kind="symmetric"))
                expected = function(product, x, group, Overlap())
                torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)

    ranks(2, body)


PICK = """
import sys
import torch
import torch.distributed as dist
from mt_tensor_parallel import TorchGemm
from mt_tensor_parallel.overlap import Overlap, Product, gather_and, symmetric_obstacle

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.cuda.device_count = lambda: 1
obstacle = lambda: symmetric_obstacle(dist.group.WORLD, torch.device("cuda", 0), None)
sys.modules["torch.distributed._symmetric_memory"] = None
print(obstacle())
del sys.modules["torch.distributed._symmetric_memory"]
x, way = torch.ones(1, 2, 2), Overlap(kind="symmetric")
try:
    gather_and(Product(TorchGemm(), x[0]), x, dist.group.WORLD, way, keep=True)
except NotImplementedError as error:  # the product exists, but not for tensors on a CPU
    print("no such product on a CPU:", "CPU" in str(error))
print(obstacle())
"""


def test_symmetric_products_are_there_once_picked() -> None:
    """In a fresh interpreter: importing torch.distributed alone does not define them."""
    command = [sys.executable, "-c", PICK]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    missing, found, obstacle, _ = out.split("\n")
    assert missing.startswith(f"this torch ({torch.__version__}) lacks it: import of torch.distrib")
    assert (found, obstacle) == ("no such product on a CPU: True", "None")


def test_symmetric_memory_where_there_is_none_is_an_error(ranks) -> None:
    def body() -> None:
        way = Overlap(kind="symmetric")
        layer = ColumnParallelLinear(
            4, 4, group=dist.group.WORLD, sequence_parallel=True, overlap=way
        )
        with pytest.raises(ValueError, match="cannot work here: the tensors are on cpu; leave ov"):
            layer(torch.ones(1, 2, 4))

    ranks(2, body)


def test_the_pick_has_a_reason(ranks) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert pick_overlap(None, sequence_parallel=True, device=cpu).reason == "one rank sends nothing"

    def body() -> list[tuple[str, str]]:
        group = dist.group.WORLD
        picks = [
            pick_overlap(group, sequence_parallel=False, device=cuda),
            pick_overlap(group, sequence_parallel=True, device=cpu),
            pick_overlap(group, sequence_parallel=True, device=cuda, gemm=NotingGemm([])),
        ]
        return [(pick.kind, pick.reason) for pick in picks]

    assert ranks(2, body)[0] == [
        ("plain", "without sequence parallelism only the output's sum travels"),
        ("plain", "on a CPU communication and products share the cores"),
        ("chunked", "no symmetric memory: the products are NotingGemm()'s"),
    ]


def test_settings_out_of_range_are_named() -> None:
    with pytest.raises(ValueError, match="chunks=1 must be 2 or more for 'chunked'"):
        Overlap(kind="chunked")
    with pytest.raises(
        ValueError, match="kind must be 'plain', 'chunked' or 'symmetric', got 'ring'"
    ):
        Overlap(kind="ring")
