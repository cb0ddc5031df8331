"""Wrong objects get errors that name the allowed ones."""

from __future__ import annotations

import math

import pytest
import torch
from mt_context_parallel import (
    AttentionMask,
    context_parallel_attention,
    pad_length,
    positions,
    segments,
    shard,
)

Q = torch.ones(1, 4, 2, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": -1}, "group must be a process group that this rank is in, or None, got -1"),
        ({"mask": 3}, "mask must be of type AttentionMask, or None, got 3"),
        ({"sinks": 3}, "sinks must be of type Tensor, or None, got 3"),
        ({"dropout": 0.1}, "dropout must be of type AttentionDropout, or None, got 0.1"),
        ({"cu_seqlens": 3}, "cu_seqlens must be a sequence of integers, got 3"),
    ],
)
def test_attention_names_wrong_objects(options, message) -> None:
    with pytest.raises(TypeError, match=message):
        context_parallel_attention(Q, Q, Q, **({"group": None} | options))


def test_attention_names_what_is_no_tensor_and_no_scale() -> None:
    with pytest.raises(TypeError, match="k must be a tensor, got NoneType"):
        context_parallel_attention(Q, None, Q, group=None)
    with pytest.raises(ValueError, match="scale=nan must be finite, or None"):
        context_parallel_attention(Q, Q, Q, group=None, scale=math.nan)
    with pytest.raises(TypeError, match="window must be an int or None, got nan"):
        AttentionMask(window=math.nan)


def test_lengths_and_ranks_are_ints_that_a_sequence_can_have() -> None:
    for call in (lambda: pad_length(math.nan, ranks=2), lambda: positions(8.0, ranks=2, rank=0)):
        with pytest.raises(TypeError, match="the length of a sequence must be an int"):
            call()
    with pytest.raises(TypeError, match="ranks must be an int, got None"):
        segments(8, ranks=None, rank=0)
    with pytest.raises(ValueError, match="at most 4,294,967,296 tokens, got 1,000,000,000,000"):
        positions(10**12, ranks=2, rank=0)
    with pytest.raises(TypeError, match="x must be a tensor, got NoneType"):
        shard(None, None)
