"""bf16 products of many rows in fp32, for processors without bf16 instructions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from mt_kernels import cpu_obstacle
from torch import Tensor

from mt_model.kernels.cpu import CpuGemm
from mt_model.kernels.packed import packed_obstacle

LEAST_ROWS = 16
"""Number of rows from which a product takes longer than a copy of its weight in fp32."""


class WideGemm(CpuGemm):
    """torch's products, with fp32 copies for many bf16 rows; see `Gemm` for shapes.

    Without bf16 instructions torch multiplies row by row, so 64 rows take 64 times as long as one.
    Both ways sum in fp32 and round once. The copy of a weight lasts for one product.
    """

    @property
    def is_torch(self) -> bool:
        """True: these are torch's products of the tensors, in another dtype."""
        return True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`."""
        is_half = x.dtype == weight.dtype == torch.bfloat16
        if not is_half or x.shape[:-1].numel() < LEAST_ROWS or torch.compiler.is_compiling():
            return super().forward(x, weight, bias)
        wide = None if bias is None else bias.float()
        return F.linear(x.float(), weight.float(), wide).to(x.dtype)

    def __repr__(self) -> str:
        return "WideGemm()"


def wide_obstacle(like: Tensor, *_: int) -> str | None:
    """Return why a product such as `like` gains nothing from fp32, or None."""
    if like.dtype != torch.bfloat16:
        return f"dtype {like.dtype}, and only bf16 is copied to fp32"
    has_own = cpu_obstacle(like) is None and packed_obstacle(like) is None
    return "this processor multiplies bf16" if has_own else cpu_obstacle(like)


def wide_drawback(*_: object) -> str:
    """Return why `auto` passes over products in fp32."""
    return "only forward products are in fp32, so a model that serves names it"
