"""Every way to hide communication gives the numbers of the plain one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from mt_tensor_parallel import ColumnParallelLinear, Overlap, RowParallelLinear, pick_overlap
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
            overlap.gather_and(
                lambda x: (events.append("multiply"), x)[1],
                torch.ones(1, 4, 2), dist.group.WORLD, Overlap(kind="chunked", chunks=2),
            )  # fmt: skip
        finally:
            overlap.start_all_gather = start
        return events

    assert ranks(2, body) == [["send", "send", "multiply", "multiply"]] * 2


def test_the_pick_has_a_reason(ranks) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert pick_overlap(None, sequence_parallel=True, device=cpu).reason == "one rank sends nothing"

    def body() -> list[tuple[str, str]]:
        group = dist.group.WORLD
        picks = [
            pick_overlap(group, sequence_parallel=False, device=cuda),
            pick_overlap(group, sequence_parallel=True, device=cpu),
            pick_overlap(group, sequence_parallel=True, device=cuda),
        ]
        return [(pick.kind, pick.reason) for pick in picks]

    assert ranks(2, body)[0] == [
        ("plain", "without sequence parallelism only the output's sum travels"),
        ("plain", "on a CPU communication and products share the cores"),
        ("chunked", "cuda copies while it computes"),
    ]


def test_settings_out_of_range_are_named() -> None:
    with pytest.raises(ValueError, match="chunks=1 must be 2 or more for 'chunked'"):
        Overlap(kind="chunked")
    with pytest.raises(ValueError, match="kind must be 'plain' or 'chunked', got 'ring'"):
        Overlap(kind="ring")
