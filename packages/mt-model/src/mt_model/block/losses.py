"""Losses that arise in layers, by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeAlias

import torch
from mt_parallel_state import Group, reduce_from_group
from torch import Tensor

Losses: TypeAlias = dict[str, Tensor]
"""Sums over tokens by name, each a scalar in fp32 or fp64."""


def take_losses(
    output: Tensor | tuple[Tensor, Mapping[str, Tensor]], names: Collection[str], *, of: str
) -> tuple[Tensor, Losses]:
    """Split the result of a mixer or feed-forward into its output and its losses.

    Args:
        output: The result.
        names: Names of the losses that its config states.
        of: Name of the module, for messages.

    Raises:
        ValueError: The losses differ from the stated ones.
        TypeError: A loss is no scalar in fp32 or fp64.
    """
    x, losses = (output, {}) if isinstance(output, Tensor) else output
    if set(losses) != set(names):
        raise ValueError(
            f"{of} returned the losses {sorted(losses)}, but its loss_weights has "
            f"{sorted(names)}: name there each that it returns, in training and out of it"
        )
    for name, loss in losses.items():
        scalar = isinstance(loss, Tensor) and not loss.shape
        if not scalar or loss.dtype not in (torch.float32, torch.float64):
            got = type(loss).__name__
            if isinstance(loss, Tensor):
                got = f"a {tuple(loss.shape)} tensor of {loss.dtype}"
            raise TypeError(
                f"loss {name!r} of {of} must be a scalar tensor in fp32 or fp64, the sum over the "
                f"tokens of its input, got {got}"
            )
    return x, {name: losses[name] for name in names}


def add_losses(first: Losses, second: Losses) -> Losses:
    """Add losses of the same name, and keep the others."""
    if not first or not second:
        return first or second
    both = {name: first[name] + second[name] for name in first if name in second}
    return {**first, **second, **both}


def sum_losses(losses: Losses, group: Group) -> Losses:
    """Sum losses over ranks that hold different tokens, in one all-reduce.

    The sum is equal on all ranks, and each rank's gradient covers its own tokens (backward
    identity).
    """
    if not losses or group is None:
        return losses
    total = reduce_from_group(torch.stack(list(losses.values())), group)
    return dict(zip(losses, total.unbind(), strict=True))
