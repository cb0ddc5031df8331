"""Products of a model that serves: see `mt_model.kernels.packed` and `wide`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from mt_moe import GroupedLinear
from mt_tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from mt_model.kernels.packed import PackedGemm, packed_obstacle
from mt_model.kernels.wide import wide_obstacle
from mt_model.language.decoder import GPT


def pack_weights(model: GPT, *, when: bool = True) -> int:
    """Copy the weights of linear layers and of the head into the layout that oneDNN reads fastest.

    Products then take the copies until a weight changes; call it again after that, or after the
    model was moved. A change that torch does not see (through `.data`, or a buffer that the weight
    is a view of) is not noticed. Models whose products are neither `packed` nor `invariant`, and
    weights on other devices, are left as they are.

    Args:
        model: Model, or stage of it, that serves.
        when: False drops the copies.

    Returns:
        The number of bytes of the copies.
    """
    gemm = model.shard.gemm
    if not isinstance(gemm, PackedGemm):
        return 0
    gemm.pack(_weights(model, gemm) if when else ())
    return gemm.packed_bytes


def packing_obstacle(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why `Kernels(gemm="packed")` can't serve a model, or None."""
    return packed_obstacle(torch.empty(0, dtype=dtype, device=device))


def serving_products(dtype: torch.dtype, device: torch.device, *, packs: bool = True) -> str:
    """Return the word for `Kernels(gemm=...)` by which a model serves fastest.

    It is `packed` where oneDNN packs weights, `wide` for bf16 on a CPU without bf16 products, and
    else `auto`.

    Args:
        dtype: Dtype of the model.
        device: Device of the model.
        packs: Whether there is memory for packed weights.
    """
    if packs and packing_obstacle(dtype, device) is None:
        return "packed"
    return "auto" if wide_obstacle(torch.empty(0, dtype=dtype, device=device)) else "wide"


def _weights(model: GPT, gemm: PackedGemm) -> Iterator[Tensor]:
    """Yield the matrices that a strategy multiplies by."""
    for layer in model.modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear) and layer.gemm is gemm:
            yield layer.matrix()
        elif isinstance(layer, GroupedLinear) and gemm in layer.gemms.all:
            yield from layer.weight.flatten(1, -2)
    if model.has_head:
        weight = model.embedding.weight if model.config.tied else model.head.weight
        if weight is not None:
            yield weight
