"""Query heads handed out with the key and value that they share."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from mt_tensor_parallel import exchange_kv_groups
from torch import Tensor


def _draw(seed: int, *, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_exchanged_heads_come_with_the_key_and_value_they_share(ranks, groups: int) -> None:
    queries, width = 8 // groups, 12

    def body() -> None:
        rank = dist.get_rank()
        whole = _draw(6, shape=(2, 3, groups, queries + 2, width))
        own = exchange_kv_groups(whole.chunk(4, -1)[rank], dist.group.WORLD)
        group, heads = rank * groups // 4, whole[..., :-2, :].flatten(2, 3).chunk(4, 2)[rank]
        expected = torch.cat((heads, whole[:, :, group, -2:]), 2).unsqueeze(2)
        torch.testing.assert_close(own, expected, rtol=0, atol=0)

    ranks(4, body)


def test_backward_is_the_adjoint(ranks) -> None:
    def body() -> tuple[float, float]:
        rank = dist.get_rank()
        x = _draw(rank, shape=(2, 8, 1, 6, 1)).requires_grad_()
        out = exchange_kv_groups(x, dist.group.WORLD)
        y = _draw(9 + rank, shape=tuple(out.shape))
        (adjoint,) = torch.autograd.grad(out, x, y)
        return (out * y).sum().item(), (x * adjoint).sum().item()

    results = ranks(2, body)
    left, right = (sum(r[side] for r in results) for side in (0, 1))
    assert left == pytest.approx(right, rel=1e-12)


def test_groups_that_do_not_fit_are_named(ranks) -> None:
    def body() -> None:
        with pytest.raises(ValueError, match="3 key/value groups of 2 query heads do not fit 2 r"):
            exchange_kv_groups(torch.ones(1, 1, 3, 4, 2), dist.group.WORLD)

    ranks(2, body)
