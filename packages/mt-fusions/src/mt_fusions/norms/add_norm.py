"""The sum with a residual and its norm, as between two sublayers."""

from __future__ import annotations

from mt_kernels import AUTO
from torch import Tensor

from mt_fusions.norms.form import Form
from mt_fusions.norms.norm import norm


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
    rounds_first: bool = False,
    kernel: str = AUTO,
) -> tuple[Tensor, Tensor]:
    """`rms_norm(x + residual)` and `x + residual`, which is rounded to the dtype of `x` first.

    See `rms_norm` for the arguments and the dtype of the arithmetic. Backward keeps the sum, the
    weight and one number per row; both terms share one gradient tensor.

    Shape:
        x, residual: [..., n]; weight: [n]. Returns the shape of x twice, contiguous.

    Raises:
        TypeError: Something is no floating tensor, x and residual differ in dtype, or eps is no
            number.
        ValueError: Shapes or devices do not fit, or the kernel does not serve.
    """
    form = Form(eps, zero_centered=zero_centered, rounds_first=rounds_first)
    _check(residual)
    return norm(x, residual, weight, None, form, kernel)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
    kernel: str = AUTO,
) -> tuple[Tensor, Tensor]:
    """`layer_norm(x + residual)` and `x + residual`, which is rounded to the dtype of `x` first.

    See `layer_norm` for the arguments and the dtype of the arithmetic. Backward keeps the sum, the
    weight and two numbers per row; both terms share one gradient tensor.

    Shape:
        x, residual: [..., n]; weight, bias: [n]. Returns the shape of x twice, contiguous.

    Raises:
        TypeError: Something is no floating tensor, x and residual differ in dtype, or eps is no
            number.
        ValueError: Shapes or devices do not fit, or the kernel does not serve.
    """
    form = Form(eps, centered=True, zero_centered=zero_centered, has_bias=bias is not None)
    _check(residual)
    return norm(x, residual, weight, bias, form, kernel)


def _check(residual: object) -> None:
    if residual is None:
        raise TypeError("residual must be a Tensor, got None; use rms_norm or layer_norm")
