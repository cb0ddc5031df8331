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
    plan_dynamic,
    ranks_for,
    shard,
    unshard,
)


@pytest.mark.parametrize(
    ("length", "ranks"),
    [(1, 1), (16, 1), (17, 2), (32, 2), (33, 4), (64, 4), (65, 8), (128, 8), (129, 16)],
)
def test_a_document_gets_the_least_power_of_two_that_holds_it(length, ranks) -> None:
    assert ranks_for(length, max_length=16) == ranks


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
        assert item.length <= 16 * item.ranks
    loads = plan.loads()
    assert sum(loads) == pytest.approx(sum(n * n for n in lengths))
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
    lengths = [8, 64, 24, 16, 32, 16]

    def draw(document: int) -> list[torch.Tensor]:
        g = torch.Generator().manual_seed(document)
        shape = (1, lengths[document], 2, 4)
        return [torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(4)]

    def body() -> dict[int, tuple[list[torch.Tensor], int]]:
        group = dist.group.WORLD
        plan = plan_dynamic(lengths, ranks=4, max_length=16)

        def step(item, block):
            *qkv, dout = (shard(x, block) for x in draw(item.document))
            qkv = [x.clone().requires_grad_() for x in qkv]
            out = context_parallel_attention(*qkv, group=block)
            out.backward(dout)
            parts = (out.detach(), *(x.grad for x in qkv))
            return [unshard(x, block) for x in parts], item.ranks

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
