"""A recurrence token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def by_steps(
    step: Callable[[Any, Tensor], tuple[Tensor, Tensor]],
    steps: tuple[Tensor, ...],
    state: Tensor,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Take the steps of a sequence one after the other.

    Args:
        step: Function of one token's parts and the state; it returns the output and the state.
        steps: Parts of the steps, as a named tuple; a part of one dim serves all tokens.
        state: State of the tokens before.
        segments: Document numbers, as `segments_of` returns them; a new one starts from zeros.

    Shape:
        steps: [B, S, ...] or [H]; segments: [B, S]. Returns [B, S, ...] and the state's.
    """
    found, length = [], max(part.shape[1] for part in steps if part.dim() > 1)
    for place in range(length):
        if segments is not None and place:
            is_new = segments[:, place] != segments[:, place - 1]
            state = state.masked_fill(is_new.view(-1, *(1,) * (state.dim() - 1)), 0)
        own = (part if part.dim() == 1 else part[:, place] for part in steps)
        y, state = step(type(steps)(*own), state)
        found.append(y)
    return torch.stack(found, 1), state
