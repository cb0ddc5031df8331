"""LayerNorm over the last dim (Ba et al., 2016)."""

from __future__ import annotations

from torch import Tensor

from mt_fusions.kernels import AUTO
from mt_fusions.norms.form import Form
from mt_fusions.norms.norm import norm


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
    kernel: str = AUTO,
) -> Tensor:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dim.

    Computed in fp32 (fp64 for fp64) and rounded once, to the dtype of `x`, also under autocast. Per
    head where heads are a dim of `x`. Backward keeps `x`, the weight and two numbers per row.

    Args:
        x: Any strides; the result is contiguous.
        weight: Of any floating dtype; None multiplies nothing.
        bias: Likewise; None adds nothing.
        eps: Added to the variance.
        zero_centered: The weight w stands for 1 + w (Megatron-LM's zero-centred gamma).
        kernel: "auto", or one of "cpu", "triton" and "reference" by name.

    Shape:
        x: [..., n]; weight, bias: [n]. Returns the shape of x.

    Raises:
        TypeError: Something is no floating tensor, or no number.
        ValueError: Shapes or devices do not fit, or the kernel does not serve.
    """
    form = Form(eps, centered=True, zero_centered=zero_centered, has_bias=bias is not None)
    return norm(x, None, weight, bias, form, kernel)[0]
