"""The split embedding against `F.embedding`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mt_parallel_state import PartitionSpec, gather_from_group, scatter_to_group, sharding_of
from mt_tensor_parallel import VocabParallelEmbedding

VOCAB, HIDDEN = 24, 6


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_split_table_equals_the_whole_one(ranks, world: int, sequence_parallel: bool) -> None:
    def body() -> None:
        group = dist.group.WORLD
        torch.manual_seed(0)
        ids = torch.randint(0, VOCAB, (3, 8))
        grad = torch.randn(3, 8, HIDDEN, dtype=torch.float64)
        torch.manual_seed(1)
        whole = VocabParallelEmbedding(VOCAB, HIDDEN, dtype=torch.float64).weight
        expected = F.embedding(ids, whole)
        expected.backward(grad)
        torch.manual_seed(1)
        table = VocabParallelEmbedding(
            VOCAB,
            HIDDEN,
            group=group,
            sequence_parallel=sequence_parallel,
            dtype=torch.float64,
        )
        assert sharding_of(table.weight).spec == PartitionSpec("tp")
        actual = table(ids)
        if sequence_parallel:
            assert actual.shape == (3, 8 // world, HIDDEN)
            actual.backward(scatter_to_group(grad, group, dim=1))
            actual = gather_from_group(actual, group, dim=1)
        else:
            actual.backward(grad)
        assert torch.equal(actual, expected)
        assert torch.equal(gather_from_group(table.weight.grad, group, dim=0), whole.grad)

    ranks(world, body)


def test_bf16_gradients_are_summed_in_fp32() -> None:
    table = VocabParallelEmbedding(4, 3, dtype=torch.bfloat16)
    ids = torch.zeros(1, 1000, dtype=torch.int64)
    table(ids).backward(torch.ones(1, 1000, 3, dtype=torch.bfloat16))
    assert table.weight.grad.dtype == torch.bfloat16
    assert table.weight.grad[0].tolist() == [1000, 1000, 1000]  # bf16 + 1 stops growing at 256
    assert table.weight.grad[1:].eq(0).all()


def gradient_bits(device: str, *, deterministic: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (4, 4096), generator=generator).to(device)
    grad = torch.randn(4, 4096, HIDDEN, generator=generator).to(device)
    table = VocabParallelEmbedding(VOCAB, HIDDEN, deterministic=deterministic, device=device)
    result = []
    for _ in range(4):
        table.weight.grad = None
        table(ids).backward(grad)
        result.append(table.weight.grad)
    exact = torch.zeros(VOCAB, HIDDEN, dtype=torch.float64, device=device)
    exact.index_add_(0, ids.flatten(), grad.flatten(0, 1).double())
    torch.testing.assert_close(result[0].double(), exact, rtol=1e-4, atol=1e-3)
    return result


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_on_a_cpu_have_the_same_bits_in_every_run(deterministic: bool) -> None:
    first, *others = gradient_bits("cpu", deterministic=deterministic)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.gpu
def test_deterministic_gradients_have_the_same_bits_in_every_run() -> None:
    first, *others = gradient_bits("cuda", deterministic=True)
    assert all(torch.equal(first, other) for other in others)


def test_ids_outside_the_vocabulary_are_errors(ranks) -> None:
    def body() -> None:
        table = VocabParallelEmbedding(VOCAB, HIDDEN, group=dist.group.WORLD)
        for bad in (-1, VOCAB):
            with pytest.raises(ValueError, match=f"token id {bad} is outside.*from 0 to 23"):
                table(torch.tensor([[0, bad]]))
        table = VocabParallelEmbedding(
            VOCAB, HIDDEN, group=dist.group.WORLD, sequence_parallel=True
        )
        with pytest.raises(ValueError, match="the sequence length is 3, which the 2 ranks"):
            table(torch.zeros(1, 3, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"splits dim 1 of \[B, S\], got ids of shape \(4,\)"):
            table(torch.zeros(4, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"vocab_size is 25, which the 2 ranks.*24 or 26"):
            VocabParallelEmbedding(25, HIDDEN, group=dist.group.WORLD)

    ranks(2, body)


def test_a_meta_table_draws_nothing() -> None:
    before = torch.random.get_rng_state()
    assert VocabParallelEmbedding(VOCAB, HIDDEN, device="meta").weight.is_meta
    assert torch.equal(torch.random.get_rng_state(), before)
