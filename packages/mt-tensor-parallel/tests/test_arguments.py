"""Wrong objects and absurd sizes get errors at once, with the allowed values."""

from __future__ import annotations

import math

import pytest
import torch
from mt_fusions import LossOptions, cross_entropy
from mt_tensor_parallel import (
    ColumnParallelLinear,
    LoraAdapter,
    LoraOptions,
    Overlap,
    RowParallelLinear,
    VocabParallelEmbedding,
    add_lora,
    linear_cross_entropy,
    parallel_linear,
    recompute,
)
from torch import nn

X, W, LABELS = torch.ones(2, 4), torch.ones(6, 4), torch.zeros(2, dtype=torch.int64)
LINEAR = [ColumnParallelLinear, RowParallelLinear]


def test_losses_name_what_they_cannot_take() -> None:
    for labels in (None, [0, 0], LABELS.float()):
        with pytest.raises(TypeError, match="labels must be a"):
            linear_cross_entropy(X, W, labels)
    with pytest.raises(TypeError, match="hidden must be a Tensor, got None"):
        linear_cross_entropy(None, W, LABELS)
    for name in ("z_loss", "label_smoothing", "softcap"):
        for value in (math.nan, math.inf, -1.0):
            with pytest.raises(ValueError, match=f"{name} .* got {value}"):
                LossOptions(**{name: value})
        with pytest.raises(TypeError, match=name):
            LossOptions(**{name: "1"})
    with pytest.raises(ValueError, match="reduction"):
        LossOptions(reduction="max")
    for name in ("vocab_size", "block_size"):
        with pytest.raises(TypeError, match=f"{name} must be an int, got '3'"):
            LossOptions(**{name: "3"})
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            LossOptions(**{name: 0})
    with pytest.raises(TypeError, match=r"options must be a LossOptions, got 0\.1"):
        linear_cross_entropy(X, W, LABELS, options=0.1)


def test_losses_and_layers_name_what_is_no_group_or_strategy() -> None:
    for call in (
        lambda: parallel_linear(X, W, mode="row", group=-1),
        lambda: ColumnParallelLinear(4, 4, group=-1),
        lambda: VocabParallelEmbedding(4, 4, group=-1),
    ):
        with pytest.raises(TypeError, match="group must be a process group that this rank is in"):
            call()
    for call in (
        lambda: linear_cross_entropy(X, W, LABELS, gemm=3),
        lambda: RowParallelLinear(4, 4, gemm=3),
        lambda: parallel_linear(X, W, mode="row", gemm=TypeError),
    ):
        with pytest.raises(TypeError, match="gemm must be a Gemm or None, got"):
            call()
    for call in (
        lambda: linear_cross_entropy(X, W, LABELS, group=-1),
        lambda: cross_entropy(X, LABELS, group=-1),
    ):
        with pytest.raises(TypeError, match="group must be a ProcessGroup"):
            call()


@pytest.mark.parametrize("layer", LINEAR)
def test_sizes_are_ints(layer) -> None:
    for wrong in (None, 4.0, math.nan, "4", True):
        with pytest.raises(TypeError, match=r"_features must be an int"):
            layer(4, wrong)
        with pytest.raises(TypeError, match=r"_features must be an int"):
            layer(wrong, 4)
    with pytest.raises(TypeError, match="x must be a Tensor, got None"):
        layer(4, 4)(None)


def test_sizes_that_no_machine_holds_are_refused_before_values_are_drawn() -> None:
    for call in (
        lambda: ColumnParallelLinear(10**12, 10**12),
        lambda: RowParallelLinear(10**6, 10**7),
        lambda: VocabParallelEmbedding(10**12, 4),
        lambda: add_lora(ColumnParallelLinear(4, 4), 10**12),
    ):
        with pytest.raises(ValueError, match=r"elements, more than the 68,719,476,736 that are"):
            call()
    assert ColumnParallelLinear(10**6, 10**6, device="meta").weight.numel() == 10**12


def test_embeddings_and_adapters_and_the_rest_name_what_they_take() -> None:
    for wrong in (None, 4.0):
        with pytest.raises(TypeError, match="vocab_size must be an int, got"):
            VocabParallelEmbedding(wrong, 4)
    with pytest.raises(ValueError, match="hidden_size must be at least 1, got 0"):
        VocabParallelEmbedding(4, 0)
    with pytest.raises(TypeError, match=r"ids must be a tensor of integers.*got torch.float32"):
        VocabParallelEmbedding(4, 4)(X)
    with pytest.raises(TypeError, match=r"module must be a Module, got None"):
        add_lora(None, 2)
    with pytest.raises(TypeError, match="layer must be a GemmLayer"):
        LoraAdapter(nn.Linear(2, 2), LoraOptions(rank=2))
    with pytest.raises(ValueError, match="alpha=nan must be finite"):
        add_lora(ColumnParallelLinear(4, 4), 2, alpha=math.nan)
    with pytest.raises(TypeError, match="chunks must be an int, got None"):
        Overlap(kind="chunked", chunks=None)
    with pytest.raises(TypeError, match="takes a function and tensors, got NoneType, Tensor"):
        recompute(None, X)
