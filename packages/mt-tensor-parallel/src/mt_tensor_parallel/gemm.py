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
"""A tensor as a strategy multiplies it: the tensor itself for torch, else an object."""
Role: TypeAlias = Literal["input", "weight", "grad"]
"""The role of a tensor in a layer: its input, its weight, or the gradient of its output."""


class Gemm:
    """The products of a linear layer as a strategy; the layer does not know the precision.

    A layer makes an operand of each tensor once. The operand is multiplied, kept for backward, and
    sent by the all-gather of a sequence-parallel layer. In this class an operand is the tensor
    itself; a strategy that quantises overrides `operand`, `saved`, `restored` and `gather` as well
    as the products.

    Activations have at least one leading dim. Results are new tensors that the caller may change
    in place. A strategy with state (scales, counters) is also an `nn.Module`: its layer then has it
    as the submodule `gemm`, and its buffers are in the layer's state dict.

    Attributes:
        row_multiple: An expert's layer pads its rows with zeros to a multiple of this, since their
            number is arbitrary.
    """

    row_multiple: int = 1

    def operand(self, x: Tensor, role: Role) -> Operand:
        """Return the operand of a tensor.

        Shape:
            x: [..., in] for the input, [out, in] for the weight, [..., out] for the gradient.
        """
        return x

    def skip(self, role: Role) -> None:
        """Record that a layer has no rows this time (an expert without tokens)."""

    def saved(self, operand: Operand) -> tuple[Tensor, ...]:
        """Return the tensors of an input or a weight to keep for backward."""
        return (operand,)

    def restored(self, tensors: Sequence[Tensor], role: Role) -> Operand:
        """Return the operand again, from the tensors of `saved`."""
        return tensors[0]

    def gather(self, operand: Operand, group: dist.ProcessGroup) -> Callable[[], Operand]:
        """Start an all-gather of the ranks' operands along the sequence.

        Returns:
            A function that waits for the whole operand and returns it.

        Shape:
            operand: from [B, s, n], an input or a gradient. Returns one of [B, ranks * s, n].
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
        """Write the weight's gradient to `out`, or add it to `out`.

        Shape:
            grad_y: [..., out]. x: [..., in]. out: contiguous, [out, in], or with these dims split.
        """
        grad = self.wgrad(grad_y, x).view_as(out)
        out.add_(grad) if accumulate else out.copy_(grad)

    @property
    def keeps_tensors(self) -> bool:
        """Whether operands are the tensors themselves, which can be sent in pieces."""
        return type(self).operand is Gemm.operand

    @property
    def is_torch(self) -> bool:
        """Whether the products with the weight are torch's own products of the tensors."""
        own = type(self)
        return (
            self.keeps_tensors and own.forward is TorchGemm.forward and own.dgrad is TorchGemm.dgrad
        )

    @property
    def is_autograd(self) -> bool:
        """Whether plain `F.linear` with autograd computes the same as this strategy."""
        return self.is_torch and type(self).wgrad is TorchGemm.wgrad


def checked_gemm(gemm: Gemm | None) -> Gemm:
    """Return the strategy, or torch's for None; raise TypeError for anything else."""
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

        torch has it for an `out` with the operands' dtype, and on CUDA for an fp32 `out` with bf16
        or fp16 operands, which is then summed in fp32. In other cases `wgrad` is added.
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
