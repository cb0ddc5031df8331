"""torch's products, with the bf16 weight gradient as a CPU likes it."""

from __future__ import annotations

import torch
from mt_tensor_parallel import TorchGemm
from torch import Tensor


class CpuGemm(TorchGemm):
    """torch's products, with the bf16 weight gradient summed over blocks of tokens.

    On AMX the product over thousands of tokens at once runs at half the speed of the other two;
    blocks of 1,024 bring it up to them. The sum is rounded to bf16 once per block.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, *, block_size: int = 1024) -> None:
        self.block_size = block_size

    def wgrad(self, grad_y: Tensor, x: Tensor) -> Tensor:
        """`grad_y.T @ x` over all leading dims.

        Shape:
            grad_y: [..., out]; x: [..., in]. Returns [out, in].
        """
        if grad_y.dtype != torch.bfloat16 or torch.compiler.is_compiling():
            return super().wgrad(grad_y, x)
        grad_blocks = grad_y.flatten(0, -2).split(self.block_size)
        x_blocks = x.flatten(0, -2).split(self.block_size)
        total = grad_blocks[0].t().mm(x_blocks[0])
        for grad_block, x_block in zip(grad_blocks[1:], x_blocks[1:], strict=True):
            total.addmm_(grad_block.t(), x_block)
        return total

    def __repr__(self) -> str:
        return f"CpuGemm(block_size={self.block_size})"
