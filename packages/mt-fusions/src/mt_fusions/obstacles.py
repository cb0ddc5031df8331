"""The implementations of each operation, and why one cannot serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_kernels import Registry

from mt_fusions.activations.bias_gelu import BIAS_GELU_KERNELS
from mt_fusions.activations.gated import GATED_KERNELS
from mt_fusions.attention.rope import ROPE_KERNELS
from mt_fusions.losses.cross_entropy import CROSS_ENTROPY_KERNELS
from mt_fusions.norms.norm import LAYER_NORM_KERNELS, RMS_NORM_KERNELS
from mt_fusions.permute import PERMUTE_KERNELS, UNPERMUTE_KERNELS
from mt_fusions.residual.bias_dropout_add import BIAS_DROPOUT_ADD_KERNELS

KERNELS: Mapping[str, Registry[Any]] = {
    "rms_norm": RMS_NORM_KERNELS,
    "layer_norm": LAYER_NORM_KERNELS,
    "add_rms_norm": RMS_NORM_KERNELS,
    "add_layer_norm": LAYER_NORM_KERNELS,
    "swiglu": GATED_KERNELS,
    "geglu": GATED_KERNELS,
    "quick_geglu": GATED_KERNELS,
    "squared_relu": GATED_KERNELS,
    "bias_gelu": BIAS_GELU_KERNELS,
    "bias_gelu_tanh": BIAS_GELU_KERNELS,
    "bias_dropout_add": BIAS_DROPOUT_ADD_KERNELS,
    "cross_entropy": CROSS_ENTROPY_KERNELS,
    "permute": PERMUTE_KERNELS,
    "unpermute": UNPERMUTE_KERNELS,
    "apply_rope": ROPE_KERNELS,
}


def obstacles(operation: str, *tensors: Any) -> dict[str, str | None]:
    """Return for each implementation of an operation why it cannot serve some tensors, or None.

    `kernel="auto"` selects the first one that can.

    Args:
        operation: Name of the operation, such as "rms_norm".
        tensors: The first arguments of the operation.

    Raises:
        ValueError: There is no such operation.

    Example:
        >>> import torch
        >>> obstacles("rms_norm", torch.ones(2, 8))["cpu"] is None
        True
    """
    if operation not in KERNELS:
        raise ValueError(f"operation must be one of {', '.join(KERNELS)}, got {operation!r}")
    return KERNELS[operation].obstacles(*tensors)
