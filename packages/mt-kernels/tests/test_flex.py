"""Flex attention returns softmax attention and its log-sum-exp, unfused on a CPU."""

from __future__ import annotations

import pytest
import torch
from mt_kernels import flex_attention


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # as it is here
def test_unfused_flex_attention_is_softmax_attention_with_its_log_sum_exp() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 3)
    out, lse = flex_attention(q, k, v, None, 0.3, 2.0, backend=None)
    scores = 2 * torch.tanh(0.3 * q @ k.repeat_interleave(2, 1).mT / 2)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, scores.softmax(-1) @ v.repeat_interleave(2, 1))
