"""Split cross entropy against `F.cross_entropy`."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_parallel_state import copy_to_group, gather_from_group
from mt_tensor_parallel import (
    LossOptions,
    VocabParallelEmbedding,
    parallel_linear,
    vocab_parallel_cross_entropy,
)
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
        actual = vocab_parallel_cross_entropy(own, labels, group=dist.group.WORLD)
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


@pytest.mark.parametrize("kernel", ["torch", "fused", "reference"])
def test_the_loss_is_one_graph(kernel: Literal["torch", "fused", "reference"]) -> None:
    options = LossOptions(kernel=kernel, z_loss=0.1)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(logits, labels, options=options)

    logits, labels, grad = _case(1.0, torch.float64)
    found = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        own = logits.clone().requires_grad_()
        value = function(own, labels)
        found.append((value.detach(), torch.autograd.grad(value, own, grad)[0]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 5),
    vocab=st.integers(1, 9),
    scale=st.sampled_from([1e-3, 1.0, 100.0, 1e30]),
    seed=st.integers(0, 1000),
)
def test_one_rank_equals_torch(rows: int, vocab: int, scale: float, seed: int) -> None:
    torch.manual_seed(seed)
    logits = (torch.randn(rows, vocab, dtype=torch.float64) * scale).requires_grad_()
    labels = torch.randint(0, vocab, (rows,))
    labels[torch.rand(rows) < 0.2] = -7
    grad = torch.randn(rows, dtype=torch.float64)
    loss = vocab_parallel_cross_entropy(logits, labels, options=LossOptions(ignore_index=-7))
    expected, expected_grad = _reference(logits, labels.masked_fill(labels == -7, -100), grad)
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-12, atol=1e-12)
    (actual,) = torch.autograd.grad(loss, logits, grad)
    torch.testing.assert_close(actual, expected_grad, rtol=1e-12, atol=1e-12)


def test_gradients_pass_gradcheck() -> None:
    logits, labels, _ = _case(1.0, torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: vocab_parallel_cross_entropy(x, labels), logits.requires_grad_()
    )


def test_masked_out_logits_and_shards_are_handled(ranks) -> None:
    def body() -> None:
        logits, labels, grad = _case(1.0, torch.float64)
        logits[..., 8:] = -torch.inf  # all of the second rank's
        logits[1, :, 3] = -torch.inf
        labels = labels.clamp(max=7).masked_fill(labels == 3, 4).masked_fill(labels < 0, -100)
        loss, grad_logits = _reference(logits, labels, grad)
        own = logits.chunk(2, -1)[dist.get_rank()].contiguous().requires_grad_()
        actual = vocab_parallel_cross_entropy(own, labels, group=dist.group.WORLD)
        actual.backward(grad)
        torch.testing.assert_close(actual, loss, rtol=1e-12, atol=1e-12)
        expected = grad_logits.chunk(2, -1)[dist.get_rank()]
        torch.testing.assert_close(own.grad, expected, rtol=1e-12, atol=1e-12)

    ranks(2, body)


def test_ignored_tokens_have_no_loss_and_no_gradient() -> None:
    logits = torch.full((2, 4), torch.inf, requires_grad=True)
    labels = torch.tensor([-100, -100])
    loss = vocab_parallel_cross_entropy(logits[:0], labels[:0])
    assert loss.shape == (0,)
    logits = torch.randn(2, 4, requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, labels)
    loss.sum().backward()
    assert loss.eq(0).all()
    assert logits.grad.eq(0).all()


def test_many_blocks_of_rows_equal_one() -> None:
    logits = torch.randn(37, 11, dtype=torch.float64, requires_grad=True)
    labels, grad = torch.randint(0, 11, (37,)), torch.randn(37, dtype=torch.float64)
    results = []
    for rows in (None, 1000, 5):
        options = LossOptions(block_size=rows)
        loss = vocab_parallel_cross_entropy(logits, labels, options=options)
        results.append((loss, *torch.autograd.grad(loss, logits, grad)))
    for loss, grad_logits in results[1:]:
        assert torch.equal(loss, results[0][0])
        assert torch.equal(grad_logits, results[0][1])


def test_no_fp32_copy_of_the_logits_is_kept() -> None:
    logits = torch.randn(64, 512, dtype=torch.bfloat16, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        vocab_parallel_cross_entropy(logits, torch.randint(0, 512, (64,)))
    large = [t for t in saved if t.numel() >= logits.numel()]
    assert [t.data_ptr() for t in large] == [logits.data_ptr()]


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
        vocab_parallel_cross_entropy(logits, labels, group=group).mean().backward()
        actual = gather_from_group(table.weight.grad, group, dim=0)
        torch.testing.assert_close(actual, whole.grad, rtol=1e-12, atol=1e-14)
        assert copy_to_group(hidden, None) is hidden

    ranks(2, body)


def test_bad_labels_and_shapes_are_named() -> None:
    logits = torch.randn(2, 3, 8)
    with pytest.raises(ValueError, match="label 8 is outside the vocabulary: ids go from 0 to 7"):
        vocab_parallel_cross_entropy(logits, torch.tensor([[0, 8, 1], [0, 0, -100]]))
    with pytest.raises(ValueError, match="label -1 is outside"):
        vocab_parallel_cross_entropy(logits, torch.tensor([[0, -1, 1], [0, 0, 0]]))
    with pytest.raises(ValueError, match=r"labels of shape \(2,\) do not match logits"):
        vocab_parallel_cross_entropy(logits, torch.zeros(2, dtype=torch.int64))


def test_gathered_logits_are_refused(ranks) -> None:
    """Counted on every rank they would be off by log(ranks)."""

    def body() -> None:
        whole = torch.zeros(2, 8)
        with pytest.raises(ValueError, match=r"every rank has all 8 columns .* count them 2 times"):
            vocab_parallel_cross_entropy(
                *(whole, torch.zeros(2, dtype=torch.int64)),
                group=dist.group.WORLD,
                options=LossOptions(vocab_size=8),
            )

    ranks(2, body)
