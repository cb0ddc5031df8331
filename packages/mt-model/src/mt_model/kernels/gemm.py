"""The matrix products of a linear layer, as a CPU likes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from mt_kernels import Candidate, Choice, Registry, cpu_obstacle
from mt_tensor_parallel import Gemm, TorchGemm
from torch import Tensor

from mt_model.kernels.onednn import OneDnnGemm, onednn_drawback, onednn_obstacle


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


class InvariantGemm(CpuGemm):
    """Products whose bits for a row do not depend on the number of rows.

    torch's product of few rows on a CPU sums in another order: of 1 to 11 rows in fp32, of one row
    in bf16. Rows are padded with zeros to a multiple of 8, in half precision of 2.
    """

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `x @ weight.T + bias`; see `Gemm` for shapes."""
        rows = x.flatten(0, -2)
        missing = -rows.shape[0] % (2 if x.dtype.itemsize == 2 else 8)
        y = super().forward(F.pad(rows, (0, 0, 0, missing)) if missing else rows, weight, bias)
        return y[: rows.shape[0]].unflatten(0, x.shape[:-1])

    def __repr__(self) -> str:
        return "InvariantGemm()"


def by_rows(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a product to tokens padded to a multiple of 8, as `InvariantGemm` does.

    Shape:
        x: [B, S, ...] -> [B, S, ...].
    """
    missing = -x.shape[1] % 8
    padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing)) if missing else x
    return product(padded)[:, : x.shape[1]]


GEMM: Registry[Callable[[], Gemm]] = Registry(
    "gemm",
    (
        Candidate("onednn", OneDnnGemm, onednn_obstacle, onednn_drawback),
        Candidate("cpu", CpuGemm, cpu_obstacle),
        Candidate("torch", TorchGemm),
        Candidate("invariant", InvariantGemm, cpu_obstacle),
    ),
)
"""The products of linear layers. Obstacles get a tensor such as the model's, and its number of
ranks."""


def make_gemm(
    given: Gemm | None, name: str, like: Tensor, ranks: int
) -> tuple[Gemm, tuple[Choice[Callable[[], Gemm]], ...]]:
    """Return the products of a model on some ranks, and their choice unless they were given."""
    if given is not None:
        return given, ()
    choice = GEMM.choose(name, like, ranks)
    return choice.candidate.function(), (choice,)
