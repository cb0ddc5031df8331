"""LayerNorm over the last dim (Ba et al., 2016)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mt_fusions
import torch
import torch.nn.functional as F
from mt_files import AUTO
from torch import Tensor, nn

from mt_model.kernels.choice import (
    Kernel,
    KernelChoice,
    choice_of,
    chosen_kernel,
    eager_obstacle,
    fused_drawback,
    fused_obstacle,
    serves,
)


@dataclass(frozen=True, kw_only=True)
class LayerNormForm:
    """What is computed beside the weight and the bias.

    Attributes:
        eps: Added to the variance.
        zero_centered: The weight w stands for 1 + w.
    """

    eps: float
    zero_centered: bool = False


def layer_norm_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, form: LayerNormForm
) -> Tensor:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`, in fp32 (fp64 for fp64), rounded once.

    Shape:
        x: [..., n]; weight, bias: [n]. Returns the shape of x.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    centered = x.to(wide) - x.to(wide).mean(-1, keepdim=True)
    y = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + form.eps)
    if weight is not None:
        y = y * (weight.to(wide) + 1 if form.zero_centered else weight.to(wide))
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)


def _by_torch(x: Tensor, weight: Tensor | None, bias: Tensor | None, form: LayerNormForm) -> Tensor:
    factor = weight + 1 if form.zero_centered and weight is not None else weight
    return F.layer_norm(x, x.shape[-1:], factor, bias, form.eps)


def _fused(x: Tensor, weight: Tensor | None, bias: Tensor | None, form: LayerNormForm) -> Tensor:
    how = {"zero_centered": form.zero_centered, "kernel": mt_fusions.fused_kernel(x)}
    return mt_fusions.layer_norm(x, weight, bias, form.eps, **how)


def _drawback(x: Tensor) -> str | None:
    """Prefer torch's, but for 16 bits on a CPU: there it sums the weight's gradient in 16 bits."""
    if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16):
        return eager_obstacle()
    return fused_drawback(x)


LAYER_NORM_KERNELS: tuple[Kernel[Tensor], ...] = (
    Kernel("fused", _fused, lambda x: fused_obstacle("layer_norm", x), _drawback),
    Kernel("torch", _by_torch, serves),
    Kernel("reference", layer_norm_reference, serves),
)


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm, by one of several kernels.

    Args:
        size: Of the last dim.
        form: What is computed.
        weight: There is one.
        bias: There is one, if there is a weight.
        dtype: Of both.
        kernel: Of `LAYER_NORM_KERNELS`, by name.

    Shape:
        forward(input): [..., size] -> [..., size].
    """

    def __init__(
        self,
        size: int,
        *,
        form: LayerNormForm,
        weight: bool,
        bias: bool,
        dtype: torch.dtype,
        kernel: str = AUTO,
    ) -> None:
        like = {"dtype": dtype, "device": "meta"}
        super().__init__(size, eps=form.eps, elementwise_affine=weight, bias=bias, **like)
        self.form, self.kernel = form, kernel

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - with a residual only
        self, input: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise the last dim; of a sum with a residual, returned too, by mt-fusions."""
        if residual is not None:
            how = {
                "zero_centered": self.form.zero_centered,
                "kernel": mt_fusions.fused_kernel(input),
            }
            given = input, residual, self.weight, self.bias, self.form.eps
            return mt_fusions.add_layer_norm(*given, **how)
        chosen = chosen_kernel("norm", LAYER_NORM_KERNELS, self.kernel, input)
        return chosen.run(input, self.weight, self.bias, self.form)

    def kernel_choices(self, like: Tensor) -> Iterator[KernelChoice]:
        """Say what computes this for tensors of the device and dtype of `like`."""
        yield choice_of("norm", LAYER_NORM_KERNELS, self.kernel, like.new_empty(0, 1))
