"""RMSNorm over the last dim (Zhang & Sennrich, 2019)."""

from __future__ import annotations

from torch import Tensor

from mt_fusions.kernels import AUTO
from mt_fusions.norms.form import Form
from mt_fusions.norms.norm import norm


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
    rounds_first: bool = False,
    kernel: str = AUTO,
) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dim.

    Computed in fp32 (fp64 for fp64) and rounded once, to the dtype of `x`, also under autocast. Per
    head where heads are a dim of `x`. Backward keeps `x`, the weight and one number per row.

    Args:
        x: Any strides; the result is contiguous.
        weight: Of any floating dtype; None multiplies nothing.
        eps: Added to the mean square.
        zero_centered: The weight w stands for 1 + w (Gemma).
        rounds_first: The weight multiplies what is rounded to the dtype of `x` already (Llama). The
            same in fp32.
        kernel: "auto", or one of "cpu", "triton" and "reference" by name.

    Shape:
        x: [..., n]; weight: [n]. Returns the shape of x.

    Raises:
        TypeError: Something is no floating tensor, or no number.
        ValueError: Shapes or devices do not fit, or the kernel does not serve.
    """
    form = Form(eps, zero_centered=zero_centered, rounds_first=rounds_first)
    return norm(x, None, weight, None, form, kernel)[0]
