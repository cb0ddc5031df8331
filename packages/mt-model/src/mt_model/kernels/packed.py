"""Products by oneDNN of weights as they are, or in its own layout, which few rows read faster."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from mt_kernels import cpu_obstacle
from torch import Tensor

from mt_model.kernels.cpu import CpuGemm

_LEAST_ROWS = 4  # fewer take as long or longer, and one row alone sums in another order
_ROWS = 64  # the number of rows that a layout is made for, which hardly changes it
_ops: Any = torch.ops.mkldnn
_linear: Any = getattr(getattr(_ops, "_linear_pointwise", None), "default", None)


class Packed(NamedTuple):
    """A weight in oneDNN's layout.

    Attributes:
        weight: The weight as it is, kept so that its address stays its own.
        version: Version of its values.
        layout: The values in oneDNN's layout.
    """

    weight: Tensor
    version: int
    layout: Tensor


class PackedGemm(CpuGemm):
    """torch's products, by oneDNN where a weight is packed; see `Gemm` for shapes.

    A weight that changes in place is multiplied as it is, until it is packed again. A copy of the
    strategy has no packed weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self._packed: dict[int, Packed] = {}

    @property
    def is_torch(self) -> bool:
        """True: these are torch's products of the tensors, by another of its libraries."""
        return True

    @property
    def packed_bytes(self) -> int:
        """Number of bytes of the packed weights."""
        return sum(each.weight.nbytes for each in self._packed.values())

    def pack(self, weights: Iterable[Tensor]) -> None:
        """Pack weights, and forget earlier ones.

        Shape:
            weights: [out, in].
        """
        self._packed = {}
        with torch.no_grad():
            for weight in weights:
                if packed_obstacle(weight) is None and not weight.is_inference():
                    layout = _ops._reorder_linear_weight(weight.detach(), _ROWS)
                    self._packed[weight.data_ptr()] = Packed(weight, weight._version, layout)

    def layout_of(self, weight: Tensor) -> Tensor | None:
        """Return a packed weight's values in oneDNN's layout; None if it has changed since."""
        found = self._packed.get(weight.data_ptr())
        if found is None or found.version != weight._version:
            return None
        return found.layout

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`."""
        is_plain = x.dtype == weight.dtype and x.dim() > 1 and not torch.compiler.is_compiling()
        layout = self.layout_of(weight) if is_plain else None
        if layout is None:
            return super().forward(x, weight, bias)
        return onednn_linear(x, layout, bias)

    def __reduce__(self) -> tuple[type[PackedGemm], tuple[()]]:
        """Copy the strategy without packed weights."""
        return type(self), ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias`; a row has the same bits in any number of rows.

    Args:
        x: Rows.
        weight: The weight, [out, in], as it is or in oneDNN's layout.
        bias: The bias; None for none.

    Shape:
        x: [..., in]; bias: [out]. Returns [..., out].
    """
    count = x.shape[:-1].numel()
    if count >= _LEAST_ROWS:
        return _linear(x, weight, bias, "none", [], "")
    if count == 1:
        return _linear(x.expand(_LEAST_ROWS, *x.shape[1:]), weight, bias, "none", [], "")[:1]
    rows = F.pad(x.flatten(0, -2), (0, 0, 0, _LEAST_ROWS - count))
    return _linear(rows, weight, bias, "none", [], "")[:count].unflatten(0, x.shape[:-1])


def packed_obstacle(like: Tensor, *_: int) -> str | None:
    """Return why oneDNN can't multiply packed weights such as `like`, or None."""
    return cpu_obstacle(like) or _missing(like.dtype)


def packed_drawback(*_: object) -> str:
    """Return why `auto` passes over packed weights."""
    return "weights that are trained have to be packed for each pass, so it has to be named"


@cache
def _missing(dtype: torch.dtype) -> str | None:
    """Return why this machine or build of torch has no packed weights of a dtype, or None."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {dtype}"
    try:
        with torch.inference_mode():
            weight = torch.ones(8, 8, dtype=dtype, device="cpu")
            found = onednn_linear(weight, _ops._reorder_linear_weight(weight, _ROWS), None)
    except (AttributeError, RuntimeError, TypeError) as error:
        return f"this build of torch or this processor lacks it ({str(error).splitlines()[0]})"
    return None if bool((found == 8).all()) else "its products are wrong"
