"""Rounding of keys and values in training as a cache in low precision would round them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from mt_quant import KVFormat


@runtime_checkable
class RoundsKV(Protocol):
    """Attention that rounds its keys and values in passes without a cache.

    Attributes:
        kv_format: Format of a cache with scales for each token; None rounds nothing.
    """

    kv_format: KVFormat | None


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, format: KVFormat) -> Tensor:
        del ctx
        return format.decode(*format.encode(x), x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        del ctx
        return grads[0], None


def rounded(x: Tensor, format: KVFormat | None) -> Tensor:
    """Round keys or values as a cache in a format without static scales does.

    Gradients pass unchanged (the straight-through estimator, Bengio et al. 2013,
    https://arxiv.org/abs/1308.3432).

    Args:
        x: Keys or values.
        format: Format of the cache; None leaves the values.

    Shape:
        x: [B, S, heads, D]. Returns the same.
    """
    return x if format is None else cast("Tensor", _Rounded.apply(x, format))


def check_rounds(layer: int, format: KVFormat, mixer: nn.Module | None) -> None:
    """Refuse to round the keys and values of a layer in passes without a cache.

    Raises:
        QuantizationError: The layer has no keys, or the format has static scales.
    """
    from mt_quant import QuantizationError

    if not isinstance(mixer, RoundsKV):
        raise QuantizationError(f"layer {layer} of this stage has no keys and values to round")
    if format.is_static:
        raise QuantizationError(
            f"{format} has scales from calibration, which training would outrun; use "
            f"{format.type}, which makes a scale for each head of each token"
        )
