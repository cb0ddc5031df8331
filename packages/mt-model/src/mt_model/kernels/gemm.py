"""The matrix products of a linear layer, as a CPU likes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from mt_kernels import Candidate, Choice, Registry, cpu_obstacle
from mt_tensor_parallel import Gemm, TorchGemm
from torch import Tensor

from mt_model.kernels.cpu import CpuGemm
from mt_model.kernels.onednn import OneDnnGemm, onednn_drawback, onednn_obstacle
from mt_model.kernels.packed import PackedGemm, onednn_linear, packed_drawback, packed_obstacle
from mt_model.kernels.wide import WideGemm, wide_drawback, wide_obstacle

EVEN = 4
"""Rows of an fp32 operand begin at even places if their width is a multiple of this number."""
_FEW = 16  # outputs; for more of them products don't look at where rows begin


class InvariantGemm(PackedGemm):
    """Products whose bits for a row do not depend on the number of rows.

    torch's product of few rows on a CPU sums in another order: of 1 to 11 rows in fp32, of one row
    in bf16. oneDNN's does so for one row alone, which it gets with three others. Where oneDNN can't
    multiply (fp64, fp16 on many processors, `torch.compile`), torch does, with rows padded to a
    multiple of 8, in half precision of 2. There few outputs of a weight whose rows begin at odd
    places are summed in orders that depend on the row, and the inputs are padded too.
    """

    @property
    def is_torch(self) -> bool:
        """False: where torch multiplies, it does with other numbers of rows."""
        return False

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `x @ weight.T + bias`; see `Gemm` for shapes."""
        is_plain = x.dtype == weight.dtype and not torch.compiler.is_compiling()
        if is_plain and packed_obstacle(weight) is None:
            layout = self.layout_of(weight)
            return onednn_linear(x, weight.contiguous() if layout is None else layout, bias)
        rows, is_half = x.flatten(0, -2), x.dtype.itemsize == 2
        missing = -rows.shape[0] % (2 if is_half else 8)
        wider = 0 if is_half or len(weight) > _FEW else -rows.shape[1] % EVEN
        if missing or wider:
            rows = F.pad(rows, (0, wider, 0, missing))
        y = F.linear(rows, F.pad(weight, (0, wider)) if wider else weight, bias)
        return y[: len(rows) - missing].unflatten(0, x.shape[:-1])


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
        Candidate("invariant", InvariantGemm),
        Candidate("packed", PackedGemm, packed_obstacle, packed_drawback),
        Candidate("wide", WideGemm, wide_obstacle, wide_drawback),
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
