"""Amounts of computation and communication, the groups in use, and refusals."""

from __future__ import annotations

import re
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from mt_context_parallel import (
    AttentionDropout,
    AttentionMask,
    HierarchicalGroups,
    ReferenceKernel,
    Tile,
    context_parallel_attention,
    merge,
    segments,
    shard,
    tiles,
    unshard,
)
from mt_context_parallel.kernels import FlashKernel, SdpaCpuKernel
from mt_parallel_state import CheckMode, ParallelLayout, ParallelState


class Counting(ReferenceKernel):
    """Counts the score entries it computes."""

    def __init__(self) -> None:
        super().__init__(block=4)
        self.tiles: list[tuple[int, int, int, int]] = []

    def forward(self, q, k, v, tile):
        self.tiles.append((tile.q.start, tile.q.length, tile.kv.start, tile.kv.length))
        return super().forward(q, k, v, tile)


def _qkv(length: int, heads: int = 4, groups: int = 4, dtype=torch.float64):
    g = torch.Generator().manual_seed(1)
    sizes = (heads, groups, groups)
    return [torch.randn(1, length, n, 8, generator=g, dtype=torch.float64).to(dtype) for n in sizes]


@pytest.mark.parametrize(
    ("mask", "cu_seqlens", "entries"),
    [
        # 32 tokens in blocks of 4: 8 x 8 blocks of 16 entries.
        (AttentionMask(), None, 36 * 16),
        (AttentionMask(causal=False), None, 64 * 16),
        (AttentionMask(window=4), None, 15 * 16),
        (AttentionMask(causal=False, window=4), None, 22 * 16),
        # Two documents in chunks of 2, whose two middle ones are neighbours and make one of 4.
        (AttentionMask(), (0, 16, 32), 2 * (36 * 4 + 4)),
    ],
)
@pytest.mark.parametrize("algorithm", ["ring", "all_gather"])
def test_wholly_masked_blocks_are_not_computed_and_zigzag_balances(
    ranks, algorithm, mask, cu_seqlens, entries
) -> None:
    def body() -> int:
        kernel = Counting()
        context_parallel_attention(
            *_qkv(8),
            group=dist.group.WORLD,
            algorithm=algorithm,
            mask=mask,
            cu_seqlens=cu_seqlens,
            kernels=(kernel,),
        )
        return sum(q * kv for _, q, _, kv in kernel.tiles)

    work = ranks(4, body)
    assert sum(work) == entries
    if mask.causal and mask.window is None and cu_seqlens is None:
        # s^2 / (2 cp) entries each, plus the upper halves of the two diagonal blocks.
        assert work == [32 * 32 // 8 + 2 * 8] * 4


@pytest.mark.parametrize("algorithm", ["ring", "all_gather", "ulysses"])
def test_the_bounds_of_the_documents_are_read_once(ranks, algorithm) -> None:
    def body() -> int:
        read, qkv = [], [x.requires_grad_() for x in _qkv(8)]
        with patch.object(torch.Tensor, "tolist", lambda x: read.append(x) or [0, 8, 16]):
            context_parallel_attention(
                *qkv,
                group=dist.group.WORLD,
                algorithm=algorithm,
                cu_seqlens=torch.tensor([0, 8, 16]),
            ).sum().backward()
        return len(read)

    assert ranks(2, body) == [1, 1]


def test_hierarchical_uses_the_groups_it_is_given(ranks) -> None:
    def body() -> bool:
        # Rank 2 * outer + inner of the layout is not the world's order: groups by (0 2) and (1 3)
        # would give other tokens than (0 1) and (2 3), and so other results.
        rank, world = dist.get_rank(), dist.group.WORLD
        inner = [dist.new_group(m) for m in ([0, 2], [1, 3])][rank % 2]
        outer = [dist.new_group(m) for m in ([0, 1], [2, 3])][rank // 2]
        groups = HierarchicalGroups(inner=inner, outer=outer)
        place = outer.rank() * 2 + inner.rank()
        whole = _qkv(32)
        chunk = [x.unflatten(1, (8, 4)) for x in whole]
        local = [torch.cat([x[:, place], x[:, 7 - place]], dim=1) for x in chunk]
        out = context_parallel_attention(*local, group=groups, algorithm="hierarchical")
        expected = context_parallel_attention(*whole, group=None).unflatten(1, (8, 4))
        expected = torch.cat([expected[:, place], expected[:, 7 - place]], dim=1)
        assert world is not None
        return bool(torch.allclose(out, expected, rtol=0, atol=1e-12))

    assert ranks(4, body) == [True] * 4


def test_levels_that_do_not_meet_in_this_rank_alone_are_refused(ranks) -> None:
    def body() -> list[str]:
        world = dist.group.WORLD
        pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        own, other = pairs if dist.get_rank() < 2 else reversed(pairs)
        HierarchicalGroups(inner=own, outer=None)
        messages = []
        for levels in ((world, world), (own, world), (own, own), (own, other)):
            with pytest.raises((ValueError, TypeError)) as error:
                HierarchicalGroups(inner=levels[0], outer=levels[1])
            messages.append(str(error.value))
        return messages

    both, partly, twice, stranger = ranks(4, body)[0]
    assert "with [0, 1, 2, 3] in common" in both
    assert "inner has the ranks [0, 1] and outer [0, 1, 2, 3], with [0, 1] in common" in partly
    assert "this rank alone, which is 0" in twice
    assert "outer must be a process group that this rank is in" in stranger


def test_the_levels_of_a_checked_state_are_checked(ranks) -> None:
    def body() -> list[str]:
        with ParallelState(ParallelLayout(cp=4), check=CheckMode()) as state:
            inner, outer = state.level_groups("cp", (2, 2))
            groups = HierarchicalGroups(inner=inner, outer=outer)
            q, k, v = (shard(x, state.group("cp")) for x in _qkv(32))
            out = context_parallel_attention(q, k, v, group=groups, algorithm="hierarchical")
            expected = context_parallel_attention(*_qkv(32), group=None)
            torch.testing.assert_close(unshard(out, state.group("cp")), expected)
            return [type(group).__name__ for group in (inner, outer)]

    assert ranks(4, body) == [["CheckedGroup"] * 2] * 4


def test_bf16_is_as_exact_as_one_rank_in_bf16(ranks) -> None:
    def body() -> float:
        rank, whole = dist.get_rank(), _qkv(32)
        exact = context_parallel_attention(*whole, group=None, split="contiguous")
        local = [x.chunk(2, dim=1)[rank].bfloat16() for x in whole]
        out = context_parallel_attention(*local, group=dist.group.WORLD, split="contiguous")
        assert out.dtype == torch.bfloat16
        return float((out.double() - exact.chunk(2, dim=1)[rank]).abs().max())

    assert max(ranks(2, body)) < 0.02


def test_the_ring_sends_before_it_computes_and_no_more_than_it_must(ranks) -> None:
    def body() -> tuple[list[str], list[str]]:
        events: list[str] = []
        send = dist.batch_isend_irecv

        class Noting(ReferenceKernel):
            def forward(self, q, k, v, tile):
                events.append("compute")
                return super().forward(q, k, v, tile)

            def backward(self, q, k, v, tile, of_queries):
                events.append("compute")
                return super().backward(q, k, v, tile, of_queries)

        def noted(operations):
            events.append("send")
            return send(operations)

        qkv = [x.requires_grad_() for x in _qkv(4)]
        dist.batch_isend_irecv = noted
        try:
            mask = AttentionMask(causal=False)
            out = context_parallel_attention(
                *qkv, group=dist.group.WORLD, mask=mask, split="contiguous", kernels=(Noting(),)
            )
            forward, events[:] = list(events), []
            out.sum().backward()
        finally:
            dist.batch_isend_irecv = send
        return forward, events

    for forward, backward in ranks(3, body):
        # The next keys are under way during each computation but the last.
        assert forward == ["send", "compute", "send", "compute", "compute"]
        # And so are the gradients of the step before.
        assert backward == ["send", "compute", "send", "send", "compute", "send", "compute", "send"]


@pytest.mark.parametrize("algorithm", ["ring", "all_gather", "ulysses"])
def test_values_may_have_another_width_than_keys(ranks, algorithm) -> None:
    def attend(group, *, whole: list[torch.Tensor], **kind) -> list[torch.Tensor]:
        own = [shard(x, group).clone().requires_grad_() for x in whole]
        out = context_parallel_attention(*own, group=group, **kind)
        out.sin().sum().backward()
        return [unshard(x, group) for x in (out.detach(), *(x.grad for x in own))]

    q, k, v = _qkv(32, groups=2)
    whole = [q, k, v[..., :3].contiguous()]

    def body() -> list[torch.Tensor]:
        return attend(dist.group.WORLD, whole=whole, algorithm=algorithm)

    scores = q.transpose(1, 2) @ k.repeat_interleave(2, dim=2).permute(0, 2, 3, 1) * 8**-0.5
    weights = scores.masked_fill(torch.ones(32, 32).triu(1).bool(), -torch.inf).softmax(-1)
    expected = weights @ whole[2].repeat_interleave(2, dim=2).transpose(1, 2)
    one = attend(None, whole=whole)
    torch.testing.assert_close(one[0], expected.transpose(1, 2))
    for ours, theirs in zip(ranks(2, body)[0], one, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_merge_of_two_halves_is_the_softmax_over_both() -> None:
    g = torch.Generator().manual_seed(2)
    scores = torch.randn(1, 2, 3, 10, generator=g, dtype=torch.float64)
    v = torch.randn(1, 2, 10, 4, generator=g, dtype=torch.float64)
    halves = []
    for part in (slice(0, 4), slice(4, 10)):
        s = scores[..., part]
        halves += [(s.softmax(-1) @ v[:, :, part]).transpose(1, 2), s.logsumexp(-1)]
    out, lse = merge(*halves)
    torch.testing.assert_close(out.transpose(1, 2), scores.softmax(-1) @ v)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_merge_of_nothing_with_nothing_is_nothing() -> None:
    out, lse = torch.zeros(1, 2, 1, 4), torch.full((1, 1, 2), -torch.inf)
    merged, total = merge(out, lse, out, lse)
    assert (merged == 0).all()
    assert (total == -torch.inf).all()


def _call(length=8, heads=4, groups=4, **kind):
    return lambda: context_parallel_attention(
        *_qkv(length, heads, groups), **{"group": None} | kind
    )


def _heads(first: int, total: int | None):
    sites = {"first_head": first, "num_heads": total}
    return _call(
        dropout=AttentionDropout(probability=0.1, key=1, sample_ids=torch.arange(1), **sites)
    )


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (_call(0), ValueError, "has 0 tokens"),
        (
            _call(mask=AttentionMask(window=9)),
            ValueError,
            "window is 9.* has 8 tokens; use at most 8",
        ),
        (lambda: AttentionMask(window=0), ValueError, "at least 1 token, got 0"),
        (_call(heads=6, groups=4), ValueError, "6 query heads.*4 key heads.*can share 3"),
        (_call(algorithm="star"), ValueError, "one of .*ring.*got 'star'"),
        (_call(sinks=torch.zeros(3)), ValueError, r"sinks must be \[4\].*\(3,\)"),
        (_call(bias=torch.zeros(4, 8)), ValueError, r"bias is \(4, 8\), but must be \(4, 15\)"),
        (_call(bias=torch.zeros(4, 15).long()), TypeError, "bias must be a tensor of floating"),
        (_call(bias=torch.zeros(4, 15, device="meta")), ValueError, "bias is on meta, but q on"),
        (
            _call(mask=AttentionMask(documents=torch.zeros(4, dtype=torch.int64))),
            ValueError,
            r"documents is \(4,\), but must be \(8,\) or \(1, 8\)",
        ),
        (
            lambda: AttentionDropout(probability=1.0, key=1, sample_ids=torch.arange(1)),
            ValueError,
            r"in \[0, 1\), got 1.0",
        ),
        (
            _call(dropout=AttentionDropout(probability=0.1, key=1, sample_ids=torch.arange(2))),
            ValueError,
            r"must be \[1\], one per sample, got \(2,\)",
        ),
        (
            lambda: context_parallel_attention(
                *_qkv(8)[:2], _qkv(8, dtype=torch.float32)[2], group=None
            ),
            TypeError,
            "one dtype, got torch.float64, torch.float64, torch.float32",
        ),
        (
            _call(mask=AttentionMask(window=3), kernels=(FlashKernel(), SdpaCpuKernel())),
            ValueError,
            "flash: device cpu; sdpa-cpu: a window of 3.*ReferenceKernel",
        ),
        (lambda: ReferenceKernel(block=0), ValueError, "at least 1 token, got 0"),
        (_call(heads=0, groups=0), ValueError, r"heads and head_dim must be at least 1, got q \(1"),
        (_call(heads=4, groups=0), ValueError, r"at least 1, got .* k \(1, 8, 0, 8\)"),
        (
            lambda: context_parallel_attention(*torch.zeros(3, 1, 8, 4, 0), group=None),
            ValueError,
            r"heads and head_dim must be at least 1, got q \(1, 8, 4, 0\)",
        ),
        (
            lambda: context_parallel_attention(*_qkv(8, dtype=torch.int64), group=None),
            TypeError,
            "one of .*torch.bfloat16.* got torch.int64",
        ),
        (
            lambda: context_parallel_attention(*_qkv(8)[:2], _qkv(8)[2].to("meta"), group=None),
            ValueError,
            "on one device, got cpu, cpu, meta",
        ),
        (_call(sinks=torch.zeros(4, device="meta")), ValueError, "sinks is on meta, but q on cpu"),
        (_call(cu_seqlens=[0, 4.5, 8]), TypeError, r"integers, got \[0, 4.5, 8\]"),
        (
            lambda: AttentionMask(documents=torch.zeros(8)),
            TypeError,
            "documents must be integers.* got torch.float32",
        ),
        (_heads(0, 2), ValueError, "first_head=0 and the 4 query heads here do not fit 2 heads"),
        (_heads(2, 5), ValueError, "first_head=2 and the 4 query heads here do not fit 5 heads"),
        (_heads(1, None), ValueError, "first_head=1 and the 4 query .* do not fit 4 heads in all"),
        (_heads(-1, 8), ValueError, "first_head=-1 and the 4 query heads here do not fit 8"),
        (
            lambda: AttentionDropout(probability=0.1, key=1, sample_ids=torch.zeros(1)),
            TypeError,
            "sample_ids must be integers.* got torch.float32",
        ),
    ],
)
def test_bad_input_is_refused_with_both_values(call, kind, message) -> None:
    with pytest.raises(kind, match=re.compile(message, re.DOTALL)):
        call()


def test_sizes_that_do_not_divide_are_refused_with_the_nearest(ranks) -> None:
    def body() -> list[str]:
        calls = [
            lambda: context_parallel_attention(*_qkv(3), group=dist.group.WORLD),
            lambda: context_parallel_attention(
                *_qkv(4, 3, 3), group=dist.group.WORLD, algorithm="ulysses"
            ),
            lambda: context_parallel_attention(
                *_qkv(4), group=dist.group.WORLD, algorithm="hierarchical"
            ),
            lambda: HierarchicalGroups.create(dist.group.WORLD, inner_size=3),
        ]
        messages = []
        for call in calls:
            with pytest.raises((ValueError, TypeError)) as error:
                call()
            messages.append(str(error.value))
        return messages

    length, heads, groups, inner = ranks(2, body)[0]
    assert "6 tokens" in length
    assert "are 4 or 8" in length
    assert "3 query heads" in heads
    assert "nearest being 4" in heads
    assert "HierarchicalGroups.create" in groups
    assert "inner_size is 3" in inner
    assert "[1, 2]" in inner


def test_the_tiles_examined_are_linear_in_documents_and_found_once(monkeypatch) -> None:
    examined = []
    make = tiles._tile
    monkeypatch.setattr(tiles, "_tile", lambda *parts: examined.append(parts) or make(*parts))
    counts = []
    for documents in (16, 64):
        whole = [x.requires_grad_() for x in _qkv(2 * documents)]
        bounds = range(0, 2 * documents + 1, 2)
        out = context_parallel_attention(
            *whole, group=None, cu_seqlens=bounds, kernels=(ReferenceKernel(),)
        )
        forward = len(examined)
        out.sum().backward()
        assert len(examined) == forward
        counts.append(forward)
        examined.clear()
    assert counts[1] == 4 * counts[0]


def test_the_keys_of_other_documents_are_not_looked_at(monkeypatch) -> None:
    kind = {"ranks": 8, "cu_seqlens": range(0, 513, 16)}
    shards = [segments(512, rank=rank, **kind) for rank in range(8)]
    run = shards[0][0]
    whole = Tile(
        q=run, kv=run, causal=True, window=None, documents=None, length=512, dropout=None, scale=1.0
    )
    examined = []
    make = tiles._tile
    monkeypatch.setattr(tiles, "_tile", lambda *parts: examined.append(parts) or make(*parts))
    found = [tile for shard in shards for tile in tiles.tiles_of(whole, shards[3], shard)]
    assert all(tile.q.document == tile.kv.document for tile in found)
    # A document has 2 runs of queries and meets 2 runs of keys of each of the 8 ranks.
    assert len(examined) <= 32 * 2 * 2 * 8
