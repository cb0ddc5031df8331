"""The kernel of the loss that a word of `Kernels.loss` names."""

from __future__ import annotations

from mt_fusions import fused_kernel
from torch import Tensor


def loss_kernel(word: str, like: Tensor) -> str:
    """Return the name of a kernel of `mt_fusions.LOSS_KERNELS`.

    Args:
        word: A name; "fused" is "triton" where that serves, else "torch".
        like: A tensor with the device and dtype of the logits.
    """
    if word != "fused":
        return word
    return "triton" if fused_kernel(like) == "triton" else "torch"
