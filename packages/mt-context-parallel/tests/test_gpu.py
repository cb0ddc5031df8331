"""The CUDA kernel against the plain one. Needs a GPU."""

from __future__ import annotations

import pytest
import torch
from mt_context_parallel import FlashKernel, ReferenceKernel, context_parallel_attention


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("cu_seqlens", [None, (0, 128, 512)])
def test_flash_is_the_plain_attention_to_bf16_accuracy(groups, cu_seqlens) -> None:
    g = torch.Generator(device="cuda").manual_seed(0)
    results = []
    drawn = [
        torch.randn(2, 512, heads, 64, generator=g, device="cuda", dtype=torch.bfloat16)
        for heads in (4, groups, groups, 4)
    ]
    for kernel in (FlashKernel(), ReferenceKernel()):
        *qkv, dout = (x.clone().requires_grad_() for x in drawn)
        out = context_parallel_attention(*qkv, group=None, cu_seqlens=cu_seqlens, kernels=(kernel,))
        out.backward(dout.detach())
        results.append([out.detach(), *(x.grad for x in qkv)])
    for ours, theirs in zip(*results, strict=True):
        error = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
        assert error < 0.02
