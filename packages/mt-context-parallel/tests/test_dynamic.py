"""Documents on as many ranks as they need: the plan, its defects elsewhere, and its execution."""

from __future__ import annotations

import time
from dataclasses import FrozenInstanceError

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from mt_context_parallel import (
    block_groups,
    context_parallel_attention,
    pad_length,
    plan_dynamic,
    ranks_for,
    shard,
    unshard,
)
from mt_parallel_state import CheckMode, ParallelLayout, ParallelState


@pytest.mark.parametrize(
    ("length", "ranks"),
    [(1, 1), (16, 1), (17, 2), (32, 2), (33, 4), (64, 4), (65, 8), (128, 8), (129, 16)],
)
def test_a_document_gets_the_least_power_of_two_that_holds_it(length, ranks) -> None:
    assert ranks_for(length, max_length=16) == ranks


@given(length=st.integers(1, 500), max_length=st.integers(2, 40))
def test_the_least_power_of_two_holds_the_padded_document(length, max_length) -> None:
    sizes = [2**n for n in range(10)]
    held = [n for n in sizes if pad_length(length, ranks=n) // n <= max_length]
    assert ranks_for(length, max_length=max_length) == held[0]


def test_padding_counts_where_ranks_are_planned() -> None:
    # 60 tokens on 4 ranks are padded to 64: 16 each.
    assert ranks_for(60, max_length=16) == 4
    assert ranks_for(60, max_length=15) == 8
    items = plan_dynamic([33, 8], ranks=4, max_length=16).items
    assert [(i.length, i.padded_length, i.ranks) for i in items] == [(33, 40, 4), (8, 8, 1)]
    assert items[0].work == 40 * 40 / 4


@given(
    lengths=st.lists(st.integers(1, 128), max_size=30),
    ranks=st.sampled_from([8, 16]),
)
def test_every_document_is_planned_once_in_an_aligned_block_and_the_loads_are_even(
    lengths, ranks
) -> None:
    plan = plan_dynamic(lengths, ranks=ranks, max_length=16)
    assert sorted(item.document for item in plan.items) == list(range(len(lengths)))
    for item in plan.items:
        assert item.length == lengths[item.document]
        assert item.first_rank % item.ranks == 0
        assert item.first_rank + item.ranks <= ranks
        assert item.padded_length % (2 * item.ranks if item.ranks > 1 else 1) == 0
        assert item.length <= item.padded_length <= 16 * item.ranks
    loads = plan.loads()
    assert sum(loads) == pytest.approx(sum(i.padded_length**2 for i in plan.items))
    # Greedy: no rank is ahead of the mean by more than the largest piece of work.
    largest = max((item.work for item in plan.items), default=0.0)
    assert max(loads) <= sum(loads) / ranks + largest + 1e-9


def test_a_plan_is_a_value() -> None:
    first = plan_dynamic([5, 40, 9], ranks=4, max_length=16)
    assert first == plan_dynamic((5, 40, 9), ranks=4, max_length=16)
    assert hash(first) == hash(plan_dynamic([5, 40, 9], ranks=4, max_length=16))
    # No cache keyed by too little: another limit is another plan.
    assert first != plan_dynamic([5, 40, 9], ranks=4, max_length=32)
    with pytest.raises(FrozenInstanceError):
        first.ranks = 2  # type: ignore[misc]
    assert all(
        type(n) is int for i in first.items for n in (i.document, i.length, i.first_rank, i.ranks)
    )


def test_no_documents_and_fewer_documents_than_ranks_leave_ranks_idle() -> None:
    assert plan_dynamic([], ranks=4, max_length=16).items == ()
    assert plan_dynamic([], ranks=4, max_length=16).loads() == (0.0,) * 4
    plan = plan_dynamic([8], ranks=4, max_length=16)
    assert [len(plan.of_rank(r)) for r in range(4)] == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan_dynamic([8], ranks=6, max_length=16), "got 6; the nearest is 4 or 8"),
        (lambda: plan_dynamic([8, 70], ranks=4, max_length=16), "document 1 has 70.*64.* to 18"),
        (lambda: plan_dynamic([60], ranks=4, max_length=15), "60 tokens.* cut it to 56 .* to 16"),
        (lambda: plan_dynamic([9], ranks=1, max_length=7), "9 tokens.* cut it to 7 .* to 9"),
        (lambda: ranks_for(2, max_length=1), "max_length is 1.* 2 tokens.* use 2 or more"),
        (lambda: plan_dynamic([0], ranks=4, max_length=16), "at least 1, got 0 and 16"),
        (lambda: plan_dynamic([8], ranks=2, max_length=8).of_rank(2), "in 0..1, got 2"),
        (
            lambda: plan_dynamic([16], ranks=2, max_length=8).run({}, 0, lambda i, g: None),
            r"a group of 2 ranks, but groups\[2\] has 1",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_documents_on_their_own_ranks_are_what_they_are_alone(ranks) -> None:
    lengths = [7, 61, 24, 16, 33, 17]  # most divide by nothing, and are padded

    def draw(document: int) -> list[torch.Tensor]:
        g = torch.Generator().manual_seed(document)
        shape = (1, lengths[document], 2, 4)
        return [torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(4)]

    def body() -> dict[int, tuple[list[torch.Tensor], int]]:
        group = dist.group.WORLD
        plan = plan_dynamic(lengths, ranks=4, max_length=16)

        def step(item, block):
            padding = (0, 0, 0, 0, 0, item.padded_length - item.length)
            *qkv, dout = (shard(F.pad(x, padding), block) for x in draw(item.document))
            qkv = [x.clone().requires_grad_() for x in qkv]
            out = context_parallel_attention(*qkv, group=block)
            out.backward(dout)
            parts = (out.detach(), *(x.grad for x in qkv))
            return [unshard(x, block)[:, : item.length] for x in parts], item.ranks

        return plan.run(block_groups(group), dist.get_rank(), step)

    found: dict[int, list[torch.Tensor]] = {}
    for result in ranks(4, body):
        for document, (parts, size) in result.items():
            assert size == ranks_for(lengths[document], max_length=16)
            found[document] = parts
    assert set(found) == set(range(len(lengths)))
    for document, (out, *grads) in found.items():
        *qkv, dout = draw(document)
        qkv = [x.transpose(1, 2).requires_grad_() for x in qkv]
        expected = F.scaled_dot_product_attention(*qkv, is_causal=True)
        expected.backward(dout.transpose(1, 2))
        for ours, theirs in zip((out, *grads), (expected, *(x.grad for x in qkv)), strict=True):
            torch.testing.assert_close(ours, theirs.transpose(1, 2), rtol=0, atol=1e-10)


def test_a_rank_waits_for_no_rank_it_shares_no_document_with(ranks) -> None:
    def body() -> float:
        rank = dist.get_rank()
        groups = block_groups(dist.group.WORLD)
        plan = plan_dynamic([32, 8], ranks=4, max_length=16)
        started = time.monotonic()

        def step(item, block):
            if item.ranks == 1:
                time.sleep(1.0)
            x = torch.zeros(1, item.length // item.ranks, 2, 4)
            return context_parallel_attention(x, x, x, group=block)

        plan.run(groups, rank, step)
        return time.monotonic() - started

    shared, other, slow, idle = ranks(4, body)
    assert slow >= 1.0
    assert max(shared, other, idle) < 0.9


def test_blocks_of_a_group_that_is_no_power_of_two_are_refused(ranks) -> None:
    def body() -> str:
        with pytest.raises(ValueError, match="power of two") as error:
            block_groups(dist.group.WORLD)
        return str(error.value)

    assert set(ranks(6, body)) == {"ranks must be a power of two, got 6; the nearest is 4 or 8"}


def test_the_blocks_of_a_checked_state_are_checked(ranks) -> None:
    def body() -> list[tuple[str, float]]:
        with ParallelState(ParallelLayout(dp=4), check=CheckMode()) as state:
            blocks = {n: state.block_group("dp-cp", n) for n in (1, 2, 4)}
            plan = plan_dynamic([5, 13, 9], ranks=4, max_length=4)
            x = torch.ones(1, 16, 2, 4)

            def step(item, block):
                own = shard(x[:, : item.padded_length], block)
                out = context_parallel_attention(own, own, own, group=block)
                return type(block).__name__, float(unshard(out, block).mean())

            return list(plan.run(blocks, state.rank, step).values())

    for found in ranks(4, body):
        assert found
        assert set(found) == {("CheckedGroup", 1.0)}
