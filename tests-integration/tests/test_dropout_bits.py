"""The fused dropout of mt-fusions has the bits of the model's."""

import mt_fusions
import pytest
import torch
from mt_fusions.residual.dropout import kept
from mt_parallel_state import hash_key, random_uniform


@pytest.mark.parametrize("probability", [0.1, 0.25, 0.5, 0.9, 1e-8])
def test_the_mask_of_the_fused_dropout_is_that_of_random_uniform(probability):
    key = hash_key("dropout", 3, 1, "mixer")
    index = torch.cat([torch.arange(40_000), torch.tensor([2**31, 2**45 + 1, 2**62])])
    assert torch.equal(kept(index, probability, key), random_uniform(key, index) >= probability)


def test_the_fused_operation_in_fp32_has_the_bits_of_the_plain_one():
    key, probability = hash_key("dropout", 0, 7, "feed_forward"), 0.1
    x, residual = torch.randn(2, 30, 64, generator=torch.Generator().manual_seed(0))
    first = torch.arange(30) * 64 + 2**33
    keep = random_uniform(key, first[:, None] + torch.arange(64)) >= probability
    plain = residual + x * keep.to(x.dtype).div_(1 - probability)
    fused = mt_fusions.bias_dropout_add(x, None, residual, probability, key=key, first=first)
    assert torch.equal(fused, plain)
