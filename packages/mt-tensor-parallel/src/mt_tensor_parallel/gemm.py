"""The three matrix products of a linear layer, as a strategy."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["AccumulatingGemm", "Gemm", "TorchGemm"]


@runtime_checkable
class Gemm(Protocol):
    """How a linear layer multiplies. The layer itself does not know the precision.

    The layer gives it activations with at least one leading dim. Results are new tensors that the
    caller may change in place.
    """

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return `x @ weight.T`.

        Shape:
            x: [..., in]. weight: [out, in]. Returns [..., out].
        """
        ...

    def dgrad(self, grad_y: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the input, `grad_y @ weight`.

        Shape:
            grad_y: [..., out]. weight: [out, in]. Returns [..., in].
        """
        ...

    def wgrad(self, grad_y: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of the weight, `grad_y.T @ x` over all leading dims.

        Shape:
            grad_y: [..., out]. x: [..., in]. Returns [out, in].
        """
        ...


@runtime_checkable
class AccumulatingGemm(Gemm, Protocol):
    """A `Gemm` that can write the weight's gradient where it is summed."""

    def wgrad_into(self, grad_y: Tensor, x: Tensor, out: Tensor, *, accumulate: bool) -> None:
        """Set `out` to the weight's gradient, or add it.

        Shape:
            grad_y: [..., out]. x: [..., in]. out: contiguous, [out, in] with any dims cut in more.
        """
        ...


class TorchGemm:
    """torch's own products, in the dtype of the tensors."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """`F.linear(x, weight)`; see `Gemm` for shapes."""
        return F.linear(x, weight)

    def dgrad(self, grad_y: Tensor, weight: Tensor) -> Tensor:
        """`grad_y @ weight`; see `Gemm` for shapes."""
        return grad_y.matmul(weight)

    def wgrad(self, grad_y: Tensor, x: Tensor) -> Tensor:
        """`grad_y.T @ x`; see `Gemm` for shapes."""
        return grad_y.flatten(0, -2).t().mm(x.flatten(0, -2))

    def wgrad_into(self, grad_y: Tensor, x: Tensor, out: Tensor, *, accumulate: bool) -> None:
        """See `AccumulatingGemm`. One kernel, without a temporary, where torch has one.

        That is for an `out` of the operands' dtype, and on CUDA for an fp32 `out` of bf16 and
        fp16 operands, which is then summed in fp32. Elsewhere `wgrad` is added.
        """
        rows = grad_y.flatten(0, -2).t()
        total = out.view(rows.shape[0], x.shape[-1])
        if out.dtype == rows.dtype:
            torch.addmm(total, rows, x.flatten(0, -2), beta=int(accumulate), out=total)
        elif out.is_cuda and out.dtype == torch.float32:
            torch.ops.aten.addmm.dtype_out(
                *(total, rows, x.flatten(0, -2), torch.float32), beta=int(accumulate), out=total
            )
        elif accumulate:
            total.add_(self.wgrad(grad_y, x))
        else:
            total.copy_(self.wgrad(grad_y, x))

    def __repr__(self) -> str:
        return "TorchGemm()"
