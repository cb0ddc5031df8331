"""The check that a router's weights are finite."""

from __future__ import annotations

import torch
from torch import Tensor

from mt_moe.error import RoutingError


def finite(weights: Tensor) -> Tensor:
    """Return whether all of a router's weights are finite.

    Shape:
        Returns [], bool.
    """
    return weights.detach().isfinite().all()


def check_finite(weights: Tensor) -> None:
    """Raise RoutingError for weights that are not finite.

    On CUDA the device stops with an error instead, so that no host has to wait.
    """
    if weights.is_meta or torch.compiler.is_compiling():
        return
    try:
        torch._assert_async(finite(weights), "a router's weights are not finite")
    except RuntimeError:
        if weights.device.type != "cpu":
            raise
        raise RoutingError(not_finite("this rank, or of one that shares its tokens,")) from None


def not_finite(owner: str) -> str:
    """Return the message for NaN or infinite weights."""
    return (
        f"the router's weights of {owner} are not finite: its logits are NaN or infinite; look at "
        "the hidden states before this layer, the learning rate, and the router's weight"
    )
