"""The choices that a full expert drops, and padded rows."""

import math

import pytest
import torch
from mt_moe import Capacity
from mt_moe.padding import pad_rows, padded_counts, padded_places, padded_size, unpad_rows
from mt_moe.routing.capacity import kept_choices
from plain import F64, drawn
from torch import distributed as dist

EXPERTS = 6


def choices(tokens, k, seed=0):
    experts = drawn(tokens, EXPERTS, seed=seed).topk(k).indices
    experts = experts.masked_fill(drawn(tokens, k, seed=seed + 1) > 1.5, EXPERTS)
    # Few different weights, so that many are equal.
    return (4 * drawn(tokens, k, seed=seed + 2).sigmoid()).round() / 4, experts


def plain_kept(weights, experts, capacity, index):
    """Choice by choice: highest weight first, or in the order of tokens alone."""
    tokens, k = experts.shape
    limit = math.ceil(tokens * k / EXPERTS * capacity.factor)
    order = sorted(
        ((t, j) for t in range(tokens) for j in range(k)),
        key=lambda at: (
            -float(weights[at]) if capacity.policy == "probability" else 0,
            int(index[at[0]]),
            at[1],
        ),
    )
    taken, kept = [0] * EXPERTS, torch.zeros(tokens, k, dtype=torch.bool)
    for at in order:
        expert = int(experts[at])
        if expert < EXPERTS and taken[expert] < limit:
            taken[expert] += 1
            kept[at] = True
    return kept


@pytest.mark.parametrize("policy", ["probability", "position"])
@pytest.mark.parametrize("factor", [0.1, 0.5, 1.0, 1.3])
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("indexed", [False, True])
def test_kept_choices_are_those_of_a_loop(policy, factor, k, indexed):
    weights, experts = choices(40, k)
    capacity = Capacity(factor=factor, policy=policy)
    index = drawn(40, seed=9).argsort() if indexed else torch.arange(40)
    given = index if indexed else None
    kept = kept_choices(weights, experts, EXPERTS, capacity, token_index=given)
    assert torch.equal(kept, plain_kept(weights, experts, capacity, index))


def test_nothing_is_dropped_from_experts_over_k_on():
    weights, experts = choices(40, 2)
    experts = experts.masked_fill(experts == 3, 4)
    experts[:, 0] = 3  # all on one expert
    kept = kept_choices(weights, experts, EXPERTS, Capacity(factor=EXPERTS / 2))
    assert torch.equal(kept, experts < EXPERTS)


@pytest.mark.parametrize("policy", ["probability", "position"])
def test_position_and_probability_are_what_they_say(policy):
    experts = torch.zeros(8, 1, dtype=torch.int64)
    weights = torch.arange(8.0).unsqueeze(1)
    kept = kept_choices(weights, experts, 2, Capacity(factor=0.5, policy=policy)).flatten()
    first = torch.arange(8) < 2
    assert torch.equal(kept, first if policy == "position" else first.flip(0))


@pytest.mark.parametrize(("dtype", "noise"), [(F64, 1e-15), (torch.float32, 2e-7)])
def test_rounding_does_not_decide_between_tokens_with_equal_weights(dtype, noise):
    weights = torch.tensor([0.3, 0.7, 0.3, 0.1, 0.7, 0.3], dtype=dtype).repeat(5).unsqueeze(1)
    experts, capacity = torch.zeros(30, 1, dtype=torch.int64), Capacity(factor=0.5)
    kept = kept_choices(weights, experts, 1, capacity)
    for seed in range(20):
        noisy = weights * (1 + noise * drawn(30, 1, seed=seed).clamp(-1, 1).to(dtype))
        assert torch.equal(kept_choices(noisy, experts, 1, capacity), kept)


@pytest.mark.parametrize("policy", ["probability", "position"])
@pytest.mark.parametrize("world", [2, 4])
def test_no_cut_of_the_tokens_changes_what_is_kept(ranks, world, policy):
    def body():
        weights, experts = choices(40, 2)
        capacity, index = Capacity(factor=0.7, policy=policy), drawn(40, seed=9).argsort()
        whole = kept_choices(weights, experts, EXPERTS, capacity, token_index=index)
        mine = slice(dist.get_rank() * 40 // world, (dist.get_rank() + 1) * 40 // world)
        shared = {"group": dist.group.WORLD, "token_index": index[mine]}
        kept = kept_choices(weights[mine], experts[mine], EXPERTS, capacity, **shared)
        assert torch.equal(kept, whole[mine])

    ranks(world, body)


@pytest.mark.parametrize(("multiple", "capacity"), [(1, None), (8, None), (16, None), (1, 11)])
@pytest.mark.parametrize("counts", [(4, 0, 9, 3), (0, 0, 11, 0), (0, 0, 0, 0)], ids=str)
def test_padding_puts_rows_of_each_expert_behind_each_other_and_zeros_between(
    counts, multiple, capacity
):
    number = sum(counts)
    rows, own = drawn(number + 2, 3).requires_grad_(), torch.tensor(counts)  # two of no expert
    filled = padded_counts(own, multiple=multiple, capacity=capacity)
    size = padded_size(number + 2, 4, multiple=multiple, capacity=capacity)
    places = padded_places(own, filled, number + 2, size)
    padded = pad_rows(rows, places, size)
    assert len(padded) == size >= int(filled.sum())
    wanted = [capacity if capacity else -(-count // multiple) * multiple for count in counts]
    assert filled.tolist() == wanted
    parts, at = rows[:number].split(counts), 0
    for part, count, room in zip(parts, counts, wanted, strict=True):
        assert torch.equal(padded[at : at + count], part)
        assert not padded[at + count : at + room].any()
        at += room
    assert not padded[at:].any()
    back = unpad_rows(padded, places)
    assert torch.equal(back[:number], rows[:number])
    assert not back[number:].any()
    back.sum().backward()
    assert torch.equal(rows.grad[:number], torch.ones(number, 3, dtype=F64))
    assert not rows.grad[number:].any()


def test_capacity_is_the_published_formula():
    assert Capacity(factor=1.25).of(100, 2, 8) == math.ceil(100 * 2 / 8 * 1.25)
    assert Capacity(factor=1e-9).of(100, 2, 8) == 1
