"""Each pair of collectives: values by definition, and the identity <f(x), y> = <x, f*(y)>."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from mt_parallel_state import (
    all_gather,
    all_to_all,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter,
    scatter_to_group,
    start_all_to_all_rows,
)
from torch import Tensor

FULL = (3, 8, 4)
LOCAL_AXIS = 1


def _draw(*key: int, shape: tuple[int, ...]) -> Tensor:
    seed = sum((k + 1) * 1009**i for i, k in enumerate(key))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# For each function: is its input (its output's gradient) equal on all ranks, and its size along
# dim 1. A tensor equal on all ranks counts once in an inner product.
CASES: dict[str, tuple[Callable[[Tensor], Tensor], bool, bool, bool, bool]] = {
    # name: (function, input equal, input whole, output gradient equal, output whole)
    "copy": (lambda x: copy_to_group(x, dist.group.WORLD), True, True, False, True),
    "reduce": (lambda x: reduce_from_group(x, dist.group.WORLD), False, True, True, True),
    "gather": (lambda x: gather_from_group(x, dist.group.WORLD, dim=1), False, False, True, True),
    "scatter": (lambda x: scatter_to_group(x, dist.group.WORLD, dim=1), True, True, False, False),
    "all_gather": (lambda x: all_gather(x, dist.group.WORLD, dim=1), False, False, False, True),
    "reduce_scatter": (
        lambda x: reduce_scatter(x, dist.group.WORLD, dim=1),
        False,
        True,
        False,
        False,
    ),
}


def _shape(*, whole: bool, world: int) -> tuple[int, ...]:
    return FULL if whole else (FULL[0], FULL[1] // world, FULL[2])


@pytest.mark.parametrize("world", [2, 4])
def test_backward_is_the_adjoint_of_forward(ranks, world: int) -> None:
    def body() -> dict[str, tuple[float, float]]:
        rank, result = dist.get_rank(), {}
        for name, (function, x_equal, x_whole, y_equal, y_whole) in CASES.items():
            x = _draw(1, 0 if x_equal else rank, shape=_shape(whole=x_whole, world=world))
            y = _draw(2, 0 if y_equal else rank, shape=_shape(whole=y_whole, world=world))
            out = function(x.requires_grad_())
            assert out.shape == y.shape
            (adjoint,) = torch.autograd.grad(out, x, y)
            left = (out * y).sum().item() * (rank == 0 or not y_equal)
            right = (x * adjoint).sum().item() * (rank == 0 or not x_equal)
            result[name] = (left, right)
        return result

    results = ranks(world, body)
    for name in CASES:
        left = sum(r[name][0] for r in results)
        right = sum(r[name][1] for r in results)
        assert left == pytest.approx(right, rel=1e-12), name


EXCHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "sequence to hidden": lambda x: all_to_all(x, dist.group.WORLD, split_dim=-1, concat_dim=1),
    "hidden to sequence": lambda x: all_to_all(x, dist.group.WORLD, split_dim=1, concat_dim=-1),
}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", EXCHANGES)
def test_backward_of_an_exchange_is_its_adjoint(ranks, name: str, world: int) -> None:
    def body() -> tuple[float, float]:
        rank = dist.get_rank()
        x = _draw(1, rank, shape=(12, 8, 8)).requires_grad_()
        out = EXCHANGES[name](x)
        y = _draw(2, rank, shape=tuple(out.shape))
        (adjoint,) = torch.autograd.grad(out, x, y)
        return (out * y).sum().item(), (x * adjoint).sum().item()

    results = ranks(world, body)
    left, right = (sum(r[side] for r in results) for side in (0, 1))
    assert left == pytest.approx(right, rel=1e-12)


def test_exchanges_move_what_they_say(ranks) -> None:
    def body() -> None:
        group, rank = dist.group.WORLD, dist.get_rank()
        whole = _draw(5, shape=(2, 4, 6))
        shard = whole.chunk(2, 1)[rank]
        hidden = all_to_all(shard, group, split_dim=2, concat_dim=1)
        torch.testing.assert_close(hidden, whole.chunk(2, 2)[rank], rtol=0, atol=0)
        back = all_to_all(hidden, group, split_dim=1, concat_dim=2)
        torch.testing.assert_close(back, shard, rtol=0, atol=0)
        rows = torch.arange(3.0) + 10 * rank
        moved = start_all_to_all_rows(rows, group, [1, 2], [1, 1] if rank == 0 else [2, 2]).wait()
        assert moved.tolist() == ([0.0, 10.0] if rank == 0 else [1.0, 2.0, 11.0, 12.0])

    ranks(2, body)


def test_exchanges_name_what_does_not_fit(ranks) -> None:
    x = torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"must be two different dims of a tensor of shape \(3, 4"):
        all_to_all(x, None, split_dim=1, concat_dim=-1)

    def body() -> None:
        with pytest.raises(ValueError, match="the nearest sizes that work are 2 or 4"):
            all_to_all(x, dist.group.WORLD, split_dim=0, concat_dim=1)

    ranks(2, body)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_values_are_those_of_the_definition(ranks, dim: int) -> None:
    def body() -> None:
        group, rank = dist.group.WORLD, dist.get_rank()
        both = [_draw(3, r, shape=(4, 6, 2)) for r in range(2)]
        x = both[rank]
        total = both[0] + both[1]
        assert torch.equal(copy_to_group(x, group), x)
        assert torch.equal(reduce_from_group(x, group), total)
        whole = torch.cat(both, dim)
        assert torch.equal(gather_from_group(x, group, dim=dim), whole)
        assert torch.equal(all_gather(x, group, dim=dim), whole)
        assert torch.equal(scatter_to_group(x, group, dim=dim), x.chunk(2, dim)[rank])
        assert torch.equal(reduce_scatter(x, group, dim=dim), total.chunk(2, dim)[rank])
        assert torch.equal(
            scatter_to_group(gather_from_group(x, group, dim=dim), group, dim=dim), x
        )

    ranks(2, body)


def test_inputs_are_not_changed_and_may_be_strided(ranks) -> None:
    def body() -> None:
        group = dist.group.WORLD
        x = _draw(5, dist.get_rank(), shape=(4, 6)).t()
        before = x.clone()
        total = before + _draw(5, 1 - dist.get_rank(), shape=(4, 6)).t()
        assert torch.equal(reduce_from_group(x, group), total)
        assert torch.equal(reduce_scatter(x, group, dim=0), total.chunk(2)[dist.get_rank()])
        all_gather(x, group, dim=1)
        assert torch.equal(x, before)

    ranks(2, body)


def test_collectives_can_be_differentiated_twice(ranks) -> None:
    def body() -> None:
        x = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
        weight = dist.get_rank() + 1
        y = reduce_from_group(weight * copy_to_group(x, dist.group.WORLD) ** 3, dist.group.WORLD)
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        assert first.item() == 3 * 3 * 9  # (1 + 2) * 3 x**2
        (second,) = torch.autograd.grad(first, x)
        assert second.item() == 3 * 6 * 3

    ranks(2, body)


def test_without_a_group_nothing_happens(ranks) -> None:
    def body() -> None:
        alone = [dist.new_group([r]) for r in range(2)][dist.get_rank()]
        x = torch.ones(3, 5)
        for group in (None, alone):
            assert copy_to_group(x, group) is x
            assert reduce_from_group(x, group) is x
            for function in (gather_from_group, scatter_to_group, all_gather, reduce_scatter):
                assert function(x, group, dim=1) is x

    ranks(2, body)


def test_a_dim_that_does_not_divide_names_both_numbers(ranks) -> None:
    def body() -> None:
        x = torch.ones(3, 5)
        for function in (scatter_to_group, reduce_scatter):
            with pytest.raises(
                ValueError, match=r"dim 1 of shape \(3, 5\) is 5, which the 2 ranks.*4 or 6"
            ):
                function(x, dist.group.WORLD, dim=1)
        with pytest.raises(ValueError, match=r"dim 2 is out of range"):
            all_gather(x, dist.group.WORLD, dim=2)

    ranks(2, body)


@pytest.mark.parametrize("wrong", [-1, "tp", object()])
def test_what_is_no_group_is_named(wrong: object) -> None:
    x = torch.ones(4, 4)
    for call in (
        lambda: copy_to_group(x, wrong),
        lambda: all_gather(x, wrong, dim=0),
        lambda: all_to_all(x, wrong, split_dim=0, concat_dim=1),
    ):
        with pytest.raises(TypeError, match="group must be a process group that this rank is in"):
            call()
