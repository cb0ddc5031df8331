"""Keys and values as a cache in low precision would give them back, in passes that learn."""

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
        kv_format: Of a cache that gives each token its scales; None rounds nothing.
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
    """Return what a cache keeps of keys or values, in a format without static scales.

    Gradients pass as they are (the straight-through estimator, Bengio et al. 2013,
    https://arxiv.org/abs/1308.3432).

    Args:
        x: Keys or values.
        format: None leaves them.

    Shape:
        x: [B, S, heads, D]. Returns the same.
    """
    return x if format is None else cast("Tensor", _Rounded.apply(x, format))


def check_rounds(layer: int, format: KVFormat, mixer: nn.Module | None) -> None:
    """Refuse to round the keys and values of a layer in passes without a cache.

    Raises:
        QuantizationError: The layer has none, or the format has static scales.
    """
    from mt_quant import QuantizationError

    if not isinstance(mixer, RoundsKV):
        raise QuantizationError(f"layer {layer} of this stage has no keys and values to round")
    if format.is_static:
        raise QuantizationError(
            f"{format} has scales from calibration, which training would outrun; use "
            f"{format.type}, which makes a scale for each head of each token"
        )
