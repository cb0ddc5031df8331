"""The three matrix products of a linear layer, as a strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mt_parallel_state import start_all_gather
from torch import Tensor

SEQUENCE_DIM = 1

Operand: TypeAlias = Any
"""What a strategy makes of a tensor: for torch the tensor itself, else an object of its own."""
Role: TypeAlias = Literal["input", "weight", "grad"]
"""What a tensor is to a layer: its input, its weight, or the gradient of its output."""


class Gemm:
    """How a linear layer multiplies. The layer itself does not know the precision.

    A layer makes an operand of each tensor once. That is what is multiplied, what is kept for
    backward, and what travels where a sequence-parallel layer gathers. Here an operand is the
    tensor itself; a strategy that quantises overrides `operand`, `saved`, `restored` and `gather`
    as well as the products.

    Activations have at least one leading dim. Results are new tensors that the caller may change
    in place. A strategy with state (scales, counters) is an `nn.Module` too: the layer that it is
    given to then has it as the submodule `gemm`, and its buffers are in the layer's state dict.

    Attributes:
        row_multiple: Where a layer gives it as many rows as chance has it (those of an expert),
            they are filled up with zeros to a multiple of this.
    """

    row_multiple: int = 1

    def operand(self, x: Tensor, role: Role) -> Operand:
        """Make the operand of a tensor.

        Shape:
            x: [..., in] for the input, [out, in] for the weight, [..., out] for the gradient.
        """
        return x

    def skip(self, role: Role) -> None:
        """Take note that a layer has no rows this time (an expert without tokens)."""

    def saved(self, operand: Operand) -> tuple[Tensor, ...]:
        """Return the tensors to keep for backward, of an input or a weight."""
        return (operand,)

    def restored(self, tensors: Sequence[Tensor], role: Role) -> Operand:
        """Make the operand again of what `saved` returned."""
        return tensors[0]

    def gather(self, operand: Operand, group: dist.ProcessGroup) -> Callable[[], Operand]:
        """Begin to join the ranks' operands along the sequence, an all-gather.

        Returns:
            A function that waits for the whole operand and returns it.

        Shape:
            Of [B, s, n], an input or a gradient. Gives [B, ranks * s, n].
        """
        return start_all_gather(operand, group, SEQUENCE_DIM).wait

    def forward(self, x: Operand, weight: Operand, bias: Tensor | None = None) -> Tensor:
        """Return `x @ weight.T + bias`.

        Shape:
            x: [..., in]. weight: [out, in]. bias: [out]. Returns [..., out].
        """
        raise NotImplementedError

    def dgrad(self, grad_y: Operand, weight: Operand) -> Tensor:
        """Return the gradient of the input, `grad_y @ weight`.

        Shape:
            grad_y: [..., out]. weight: [out, in]. Returns [..., in].
        """
        raise NotImplementedError

    def wgrad(self, grad_y: Operand, x: Operand) -> Tensor:
        """Return the gradient of the weight, `grad_y.T @ x` over all leading dims.

        Shape:
            grad_y: [..., out]. x: [..., in]. Returns [out, in].
        """
        raise NotImplementedError

    def wgrad_into(self, grad_y: Operand, x: Operand, out: Tensor, *, accumulate: bool) -> None:
        """Set `out` to the weight's gradient, or add it.

        Shape:
            grad_y: [..., out]. x: [..., in]. out: contiguous, [out, in] with any dims cut in more.
        """
        grad = self.wgrad(grad_y, x).view_as(out)
        out.add_(grad) if accumulate else out.copy_(grad)

    @property
    def keeps_tensors(self) -> bool:
        """Whether operands are the tensors themselves, which may be cut and sent in pieces."""
        return type(self).operand is Gemm.operand

    @property
    def is_torch(self) -> bool:
        """Whether the products with the weight are torch's own, of the tensors themselves."""
        own = type(self)
        return (
            self.keeps_tensors and own.forward is TorchGemm.forward and own.dgrad is TorchGemm.dgrad
        )

    @property
    def is_autograd(self) -> bool:
        """Whether `F.linear` and its own backward do the same."""
        return self.is_torch and type(self).wgrad is TorchGemm.wgrad


def checked_gemm(gemm: Gemm | None) -> Gemm:
    """Return a strategy, torch's for None; raise TypeError for what is none."""
    if gemm is None:
        return TorchGemm()
    if not isinstance(gemm, Gemm):
        raise TypeError(f"gemm must be a Gemm or None, got {gemm!r}; derive from mt's Gemm class")
    return gemm


class TorchGemm(Gemm):
    """torch's own products, in the dtype of the tensors."""

    def forward(self, x: Operand, weight: Operand, bias: Tensor | None = None) -> Tensor:
        """`F.linear(x, weight, bias)`, which rounds once; see `Gemm` for shapes."""
        return F.linear(x, weight, bias)

    def dgrad(self, grad_y: Operand, weight: Operand) -> Tensor:
        """`grad_y @ weight`; see `Gemm` for shapes."""
        return grad_y.matmul(weight)

    def wgrad(self, grad_y: Operand, x: Operand) -> Tensor:
        """`grad_y.T @ x`; see `Gemm` for shapes."""
        return grad_y.flatten(0, -2).t().mm(x.flatten(0, -2))

    def wgrad_into(self, grad_y: Operand, x: Operand, out: Tensor, *, accumulate: bool) -> None:
        """See `Gemm.wgrad_into`. One kernel, without a temporary, where torch has one.

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
        else:
            super().wgrad_into(grad_y, x, total, accumulate=accumulate)

    def __repr__(self) -> str:
        return "TorchGemm()"
