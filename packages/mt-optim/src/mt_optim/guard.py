"""What happens between reduced gradients and the update: measure, decide, clip."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from mt_data_parallel import Piece, pieces_of
from mt_parallel_state import ParallelState
from torch import Tensor, nn

from mt_optim.clip import clip_grad_norm
from mt_optim.group import check_number
from mt_optim.result import StepResult


class StepGuard:
    """Decides, with one answer on all ranks, whether a step is applied, and clips gradients.

    The decision is taken from the norm of the whole model's gradient, which every rank gets with
    the same bits: before anything changes, and for every optimizer alike.

    Args:
        named_params: This rank's names and parameters, or pieces.
        state: Process groups and this rank's place in them.
        max_norm: Largest norm to let through; None never clips.
        max_value: Largest magnitude of a gradient's element, clipped after the norm; None for any.
        skip_above: A step whose norm is above is skipped; None skips only what is not finite.

    Raises:
        ValueError: A threshold is not positive.
        TypeError: A threshold is no number.
    """

    def __init__(
        self,
        named_params: Iterable[tuple[str, nn.Parameter] | Piece],
        state: ParallelState,
        *,
        max_norm: float | None = None,
        max_value: float | None = None,
        skip_above: float | None = None,
    ) -> None:
        limits = {"max_norm": max_norm, "max_value": max_value, "skip_above": skip_above}
        for what, limit in limits.items():
            if limit is not None and not check_number(what, limit) > 0:
                raise ValueError(f"{what} must be positive (None for no limit), got {limit}")
        self._pieces, self._state = pieces_of(named_params), state
        self._max_norm = math.inf if max_norm is None else max_norm
        self._max_value, self._skip_above = max_value, skip_above

    @torch.no_grad()
    def admit(self) -> StepResult:
        """Measure and clip the gradients; communicates as `clip_grad_norm` does.

        Returns:
            Whether to step, and the norm. The gradients of a step that is not taken are as they
            were.
        """
        most = math.inf if self._skip_above is None else self._skip_above
        norm = clip_grad_norm(self._pieces, self._state, self._max_norm)
        admitted = math.isfinite(norm) and norm <= most
        if admitted and self._max_value is not None:
            torch._foreach_clamp_min_(self._grads(), -self._max_value)
            torch._foreach_clamp_max_(self._grads(), self._max_value)
        return StepResult(stepped=admitted, grad_norm=norm)

    def _grads(self) -> list[Tensor]:
        return [grad for piece in self._pieces if (grad := piece.grad) is not None]
