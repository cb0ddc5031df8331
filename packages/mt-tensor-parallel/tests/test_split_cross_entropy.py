"""`mt_fusions.cross_entropy` behind parallel layers, against `F.cross_entropy`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mt_fusions import cross_entropy
from mt_parallel_state import copy_to_group, gather_from_group
from mt_tensor_parallel import VocabParallelEmbedding, parallel_linear
from torch import Tensor


def _reference(logits: Tensor, labels: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.detach().double().requires_grad_()
    loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    loss = loss.view(labels.shape)
    return loss.detach(), torch.autograd.grad(loss, logits, grad.double())[0]


def _case(scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    logits = (torch.randn(3, 5, 16, dtype=torch.float64) * scale).to(dtype)
    labels = torch.randint(0, 16, (3, 5))
    labels[0, 1] = labels[2, 4] = -100
    return logits, labels, torch.randn(3, 5, dtype=torch.float64)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_split_logits_give_the_loss_and_gradient_of_whole_ones(
    ranks, world: int, scale: float, dtype: torch.dtype
) -> None:
    def body() -> None:
        logits, labels, grad = _case(scale, dtype)
        loss, grad_logits = _reference(logits, labels, grad)
        own = logits.chunk(world, -1)[dist.get_rank()].contiguous().requires_grad_()
        actual = cross_entropy(own, labels, group=dist.group.WORLD, reduction="none")
        assert actual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        actual.backward(grad.to(actual.dtype))
        tolerance = 1e-10 if dtype == torch.float64 else 2e-6
        torch.testing.assert_close(actual.double(), loss, rtol=tolerance, atol=tolerance)
        whole = gather_from_group(own.grad, dist.group.WORLD, dim=-1)
        tolerance = {torch.float64: 1e-10, torch.float32: 2e-6, torch.bfloat16: 4e-3}[dtype]
        torch.testing.assert_close(
            whole.double(), grad_logits, rtol=tolerance, atol=min(tolerance, 1e-6)
        )

    ranks(world, body)


def test_a_tied_head_gets_both_gradients(ranks) -> None:
    """Embedding and head share one split table; so does the dense model."""

    def body() -> None:
        group = dist.group.WORLD
        torch.manual_seed(0)
        ids, labels = torch.randint(0, 12, (2, 2, 4))
        torch.manual_seed(1)
        whole = VocabParallelEmbedding(12, 6, dtype=torch.float64).weight
        hidden = F.embedding(ids, whole).tanh()
        F.cross_entropy((hidden @ whole.T).flatten(0, 1), labels.flatten()).backward()
        torch.manual_seed(1)
        table = VocabParallelEmbedding(12, 6, group=group, dtype=torch.float64)
        hidden = table(ids).tanh()
        logits = parallel_linear(hidden, table.weight, mode="column", group=group)
        cross_entropy(logits, labels, group=group).backward()
        actual = gather_from_group(table.weight.grad, group, dim=0)
        torch.testing.assert_close(actual, whole.grad, rtol=1e-12, atol=1e-14)
        assert copy_to_group(hidden, None) is hidden

    ranks(2, body)


def test_a_compiled_split_loss_is_the_eager_one(ranks) -> None:
    def body() -> None:
        logits, labels, grad = _case(1.0, torch.float64)
        found = []
        for function in (cross_entropy, torch.compile(cross_entropy, backend="aot_eager")):
            own = logits.chunk(2, -1)[dist.get_rank()].clone().requires_grad_()
            loss = function(own * 1, labels, group=dist.group.WORLD, reduction="none", z_loss=0.1)
            found.append((loss.detach(), *torch.autograd.grad(loss, own, grad)))
        torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)

    ranks(2, body)
