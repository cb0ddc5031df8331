"""Which tokens each rank holds: balance, positions, the inverse, and the errors."""

from __future__ import annotations

import re
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from mt_context_parallel import pad_length, positions, segments, shard, unshard
from mt_context_parallel.splits import order_of


def _tokens(runs) -> list[int]:
    return [t for s in runs for t in range(s.start, s.start + s.length)]


def test_zigzag_gives_rank_i_the_chunks_i_and_its_mirror() -> None:
    held = [_tokens(segments(8, ranks=2, rank=r)) for r in range(2)]
    assert held == [[0, 1, 6, 7], [2, 3, 4, 5]]


@given(ranks=st.sampled_from([1, 2, 4, 8, 3]), chunk=st.integers(1, 5))
def test_zigzag_gives_every_rank_the_same_causal_work(ranks: int, chunk: int) -> None:
    length = pad_length(chunk * 2 * ranks, ranks=ranks)
    work = [
        sum(t + 1 for t in _tokens(segments(length, ranks=ranks, rank=r))) for r in range(ranks)
    ]
    assert len(set(work)) == 1
    assert sum(work) == length * (length + 1) // 2


@given(
    ranks=st.sampled_from([1, 2, 3, 4]),
    chunks=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    split=st.sampled_from(["zigzag", "contiguous"]),
)
def test_every_token_has_one_rank_and_its_position(ranks, chunks, split) -> None:
    sizes = [c * 2 * ranks for c in chunks]
    cu_seqlens = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    expected = [p for size in sizes for p in range(size)]
    seen: list[int] = []
    for rank in range(ranks):
        kind = {"ranks": ranks, "rank": rank, "split": split, "cu_seqlens": cu_seqlens}
        runs = segments(cu_seqlens[-1], **kind)
        assert [s.local for s in runs] == [
            sum(r.length for r in runs[:n]) for n in range(len(runs))
        ]
        tokens = _tokens(runs)
        seen += tokens
        assert positions(cu_seqlens[-1], **kind).tolist() == [expected[t] for t in tokens]
        for s in runs:
            assert cu_seqlens[s.document] <= s.start < cu_seqlens[s.document + 1]
    assert sorted(seen) == list(range(cu_seqlens[-1]))


@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
@pytest.mark.parametrize("cu_seqlens", [None, [0, 8, 24]])
@pytest.mark.parametrize("world", [2, 4])
def test_unshard_inverts_shard_and_its_backward_is_the_adjoint(
    ranks, split, cu_seqlens, world
) -> None:
    def body() -> tuple[bool, float, float]:
        g = torch.Generator().manual_seed(3)
        whole = torch.randn(2, 24, 3, generator=g, dtype=torch.float64)
        if cu_seqlens is None and split == "zigzag":
            whole = whole[:, :16]
        group, kind = dist.group.WORLD, {"split": split, "cu_seqlens": cu_seqlens}
        local = shard(whole, group, **kind).requires_grad_()
        back = unshard(local, group, **kind)
        weight = torch.randn(whole.shape, generator=g, dtype=torch.float64)
        weight = weight * (dist.get_rank() + 1)
        (back * weight).sum().backward()
        other = local.detach().cos()
        return (
            bool(torch.equal(back, whole)),
            float((local.grad * other).sum()),
            float((unshard(other, group, **kind) * weight).sum()),
        )

    results = ranks(world, body)
    assert all(equal for equal, _, _ in results)
    assert sum(r[1] for r in results) == pytest.approx(sum(r[2] for r in results), rel=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: segments(10, ranks=2, rank=0), "has 10 tokens.* 4 equal parts.*work are 8 or 12"),
        (lambda: segments(2, ranks=2, rank=0), "has 2 tokens.* that work are 4;"),
        (lambda: segments(9, ranks=2, rank=0, split="contiguous"), "9 tokens.*work are 8 or 10"),
        (
            lambda: segments(12, ranks=2, rank=0, cu_seqlens=[0, 6, 12]),
            "document 0 has 6 tokens.*work are 4 or 8",
        ),
        (lambda: segments(0, ranks=2, rank=0), "has 0 tokens; at least 1"),
        (lambda: segments(8, ranks=2, rank=2), "rank must be in 0..1, got 2"),
        (lambda: segments(8, ranks=0, rank=0), "ranks must be at least 1, got 0"),
        (lambda: segments(8, ranks=2, rank=0, split="snake"), "one of .*zigzag.*got 'snake'"),
        (lambda: segments(8, ranks=2, rank=0, cu_seqlens=[0, 4]), "from 0 to .* 8, .* ends"),
        (lambda: segments(8, ranks=2, rank=0, cu_seqlens=[0, 4, 4, 8]), "document 1 goes from 4"),
        (lambda: shard(torch.zeros(1, 0), None), "has 0 tokens"),
        (lambda: shard(torch.zeros(1, 8), None, split="snake"), "one of .*zigzag.*got 'snake'"),
        (lambda: unshard(torch.zeros(1, 8), None, split="snake"), "one of .*zigzag.*got 'snake'"),
        (lambda: unshard(torch.zeros(1, 8), None, cu_seqlens=[0, 4]), "from 0 to .* 8, .* ends"),
        (
            lambda: shard(torch.zeros(1, 8), None, cu_seqlens=torch.tensor([[0, 4, 8]])),
            r"must be \[documents \+ 1\], got shape \(1, 3\)",
        ),
    ],
)
def test_a_length_that_does_not_divide_is_refused_with_the_nearest(call, message) -> None:
    with pytest.raises(ValueError, match=re.compile(message)):
        call()


def test_pad_length_is_the_least_length_that_splits() -> None:
    assert [pad_length(n, ranks=2) for n in (0, 1, 4, 5)] == [4, 4, 4, 8]
    assert [pad_length(n, ranks=3, split="contiguous") for n in (1, 3, 4)] == [3, 3, 6]
    assert pad_length(7, ranks=1) == 7


@pytest.mark.parametrize(
    "bounds", [[0, 4.5, 8], torch.tensor([0.0, 4.0, 8.0]), [[0, 4, 8]], 8, ["0", "8"]], ids=str
)
@pytest.mark.parametrize("call", [shard, unshard])
def test_bounds_that_are_no_integers_are_refused_and_not_rounded(bounds, call) -> None:
    with pytest.raises(TypeError, match="cu_seqlens must be a sequence of integers, got"):
        call(torch.zeros(1, 8), None, cu_seqlens=bounds)


def test_an_index_of_many_documents_is_built_on_the_host() -> None:
    kind = {"ranks": 2, "cu_seqlens": range(0, 65, 4)}
    runs = [segments(64, rank=rank, **kind) for rank in range(2)]
    with patch.object(torch, "arange", wraps=torch.arange) as made:
        order = order_of(runs, torch.device("meta"))
        where = positions(64, rank=0, device="meta", **kind)
    # One launch a run would be hundreds on a GPU, in each layer.
    assert not any("device" in call.kwargs for call in made.mock_calls)
    assert (order.shape, where.shape) == ((64,), (32,))
    assert order.is_meta
    assert where.is_meta
