"""The CUDA kernels against the plain one. Needs a GPU."""

from __future__ import annotations

import pytest
import torch
from mt_context_parallel import AttentionMask, ReferenceKernel, context_parallel_attention
from mt_context_parallel.flex import FlexKernel
from mt_context_parallel.kernels import CudnnKernel, FlashKernel


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "groups", "window"),
    [
        (FlashKernel, 4, None),
        (FlashKernel, 2, None),
        (CudnnKernel, 4, None),
        (CudnnKernel, 2, None),
        (FlexKernel, 4, None),
        (FlexKernel, 2, 100),
    ],
)
@pytest.mark.parametrize("cu_seqlens", [None, (0, 128, 512)])
def test_a_cuda_kernel_is_the_plain_attention_to_bf16_accuracy(
    kernel, groups, window, cu_seqlens
) -> None:
    g = torch.Generator(device="cuda").manual_seed(0)
    results = []
    drawn = [
        torch.randn(2, 512, heads, 64, generator=g, device="cuda", dtype=torch.bfloat16)
        for heads in (4, groups, groups, 4)
    ]
    for used in (kernel(), ReferenceKernel()):
        *qkv, dout = (x.clone().requires_grad_() for x in drawn)
        out = context_parallel_attention(
            *qkv,
            group=None,
            mask=AttentionMask(window=window),
            cu_seqlens=cu_seqlens,
            kernels=(used,),
        )
        out.backward(dout.detach())
        results.append([out.detach(), *(x.grad for x in qkv)])
    for ours, theirs in zip(*results, strict=True):
        error = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
        assert error < 0.02
