"""Threads of a model's products."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mt_model import GPT

_ONE_THREAD_PARAMETERS = 1 << 22


def use_threads(model: GPT) -> None:
    """Use one thread for a small model, because threads wait for each other in tiny products.

    With a second thread the quickstart's tokens were twenty times slower on two busy cores, and no
    faster on idle ones.
    """
    import torch

    if sum(param.numel() for param in model.parameters()) <= _ONE_THREAD_PARAMETERS:
        torch.set_num_threads(1)
