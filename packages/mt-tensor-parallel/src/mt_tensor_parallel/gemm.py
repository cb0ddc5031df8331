"""The three matrix products of a linear layer, as a strategy."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch.nn.functional as F
from torch import Tensor

__all__ = ["Gemm", "TorchGemm"]


@runtime_checkable
class Gemm(Protocol):
    """How a linear layer multiplies. The layer itself does not know the precision.

    Results are new tensors that the caller may change in place.
    """

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns ``x @ weight.T``.

        Shape:
            x: [..., in]. weight: [out, in]. Returns [..., out].
        """
        ...

    def dgrad(self, grad_y: Tensor, weight: Tensor) -> Tensor:
        """Returns the gradient of the input, ``grad_y @ weight``.

        Shape:
            grad_y: [..., out]. weight: [out, in]. Returns [..., in].
        """
        ...

    def wgrad(self, grad_y: Tensor, x: Tensor) -> Tensor:
        """Returns the gradient of the weight, ``grad_y.T @ x`` over all leading dims.

        Shape:
            grad_y: [..., out]. x: [..., in]. Returns [out, in].
        """
        ...


class TorchGemm:
    """torch's own products, in the dtype of the tensors."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """``F.linear(x, weight)``; see :class:`Gemm` for shapes."""
        return F.linear(x, weight)

    def dgrad(self, grad_y: Tensor, weight: Tensor) -> Tensor:
        """``grad_y @ weight``; see :class:`Gemm` for shapes."""
        return grad_y.matmul(weight)

    def wgrad(self, grad_y: Tensor, x: Tensor) -> Tensor:
        """``grad_y.T @ x``; see :class:`Gemm` for shapes."""
        return grad_y.flatten(0, -2).t().mm(x.flatten(0, -2))

    def __repr__(self) -> str:
        return "TorchGemm()"
