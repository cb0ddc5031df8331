"""The global gradient norm, every logical element counted once, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from mt_data_parallel import Piece, pieces_of
from mt_parallel_state import ParallelState
from torch import Tensor, nn

from mt_optim.group import check_number
from mt_optim.statistics import GradMeter, joined

REST = "rest"  # what is in no group of its own


@dataclass(frozen=True, kw_only=True)
class NormGroup:
    """Parameters whose gradient is clipped alone, by a norm of its own.

    A parameter is meant if everything that is given here matches it.

    Attributes:
        names: A glob over the parameter's name, such as `*.experts.*`; `*` stands for dots too.
        where: A function of name and parameter.
        max_norm: The largest norm of their gradient.

    Raises:
        ValueError: Nothing says which parameters are meant, or the norm is not positive.
        TypeError: A field is of another type.
    """

    names: str | None = None
    where: Callable[[str, Tensor], bool] | None = None
    max_norm: float

    def __post_init__(self) -> None:
        if not isinstance(self.names, str | None):
            raise TypeError(f"names must be a string, got {self.names!r:.60}")
        if self.where is not None and not callable(self.where):
            raise TypeError(f"where must be a function, got {self.where!r:.60}")
        if self.names is None and self.where is None:
            raise ValueError("a norm group needs names or where, to say whose norm it is")
        check_positive("max_norm", self.max_norm)

    def matches(self, name: str, param: Tensor) -> bool:
        """Say whether a parameter is meant."""
        return (self.names is None or fnmatchcase(name, self.names)) and (
            self.where is None or bool(self.where(name, param))
        )

    def __str__(self) -> str:
        return self.names or getattr(self.where, "__name__", "where")


def norm_group_of(piece: Piece, groups: Sequence[NormGroup]) -> str:
    """Return the name of the group that a piece is in, `rest` if it is in none.

    Raises:
        ValueError: It is in several.
    """
    found = [str(group) for group in groups if group.matches(piece.name, piece.source)]
    if len(found) > 1:
        raise ValueError(
            f"parameter {piece.name!r} is in the norm groups {' and '.join(found)}; let one of "
            "them match it"
        )
    return found[0] if found else REST


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Return what gradients of a norm are multiplied with: 1 where it is small enough."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


def check_positive(what: str, value: float) -> None:
    """Check a threshold.

    Raises:
        ValueError: It is not positive.
        TypeError: It is no number.
    """
    if not check_number(what, value) > 0:
        raise ValueError(f"{what} must be positive (None for no limit), got {value}")


def check_once(pieces: Iterable[Piece]) -> None:
    """Check that no parameter is listed twice.

    Raises:
        ValueError: One is.
    """
    names: dict[int, str] = {}
    for piece in pieces:
        if names.setdefault(id(piece.param), piece.name) != piece.name:
            raise ValueError(
                f"parameter {piece.name!r} is listed twice, also as {names[id(piece.param)]!r}; "
                "list a shared parameter once, as module.named_parameters() does"
            )


def grad_norm(
    named_params: Iterable[tuple[str, nn.Parameter] | Piece], state: ParallelState
) -> float:
    """Return the L2 norm of the whole model's gradient.

    Which elements this rank answers for follows from each parameter's sharding record and the
    piece of it that the rank steps (`mt_parallel_state.is_owner`): shards are added over the axes
    that split them, a parameter that an axis replicates counts on that axis's first rank only,
    ranges of a sharded optimizer count where they are stepped, pipeline stages hold different
    parameters, and copies owned by another stage (`is_copy`) are left out. What a rank does not
    answer for is looked at all the same: if it is not finite there, the norm is not. Call it after
    the gradients are reduced. It communicates once, over all ranks of the layout.

    Squares are summed in fp32 rows and then fp64 (all in fp64 for fp64 gradients), so the norm
    depends on how parameters are cut by about 1e-7 relative only. Every rank gets the same bits.

    Args:
        named_params: This rank's names and parameters, or pieces (`GradBuffer.pieces()`), which it
            has to be where a reduction has shards; gradients are read by
            `mt_data_parallel.grad_of`, a missing one counts as zero.
        state: Process groups and this rank's place in them.

    Returns:
        The norm; inf or nan if some gradient is not finite.

    Raises:
        ValueError: A parameter is listed twice.
        TypeError: `state` is no ParallelState, or something is not a parameter.
    """
    if not isinstance(state, ParallelState):
        raise TypeError(f"state must be a ParallelState, got {type(state).__name__}")
    pieces = pieces_of(named_params)
    check_once(pieces)
    measured, _ = GradMeter([pieces], state).measure()
    return joined(measured).norm


@torch.no_grad()
def clip_grad_norm(
    named_params: Iterable[tuple[str, nn.Parameter] | Piece], state: ParallelState, max_norm: float
) -> float:
    """Scale all gradients so that their global norm is at most `max_norm`.

    Gradients are multiplied in place by `max_norm / (norm + 1e-6)` if that is below 1 (the rule
    of torch.nn.utils.clip_grad_norm_). If the norm is inf or nan they are left as they are, and
    since all ranks get the same norm they can all skip the step:
    `if math.isfinite(norm): optimizer.step()`.

    Args:
        named_params: This rank's names and parameters, or pieces.
        state: Process groups and this rank's place in them.
        max_norm: Largest norm to let through; `math.inf` only measures.

    Returns:
        The norm before clipping.

    Raises:
        ValueError: `max_norm` is not positive.
    """
    if not check_number("max_norm", max_norm) > 0:
        raise ValueError(f"max_norm must be positive (math.inf never clips), got {max_norm}")
    pieces = pieces_of(named_params)
    norm = grad_norm(pieces, state)
    factor = clip_factor(norm, max_norm)
    if math.isfinite(norm) and factor < 1:
        grads = [grad for piece in pieces if (grad := piece.grad) is not None]
        if grads:
            torch._foreach_mul_(grads, factor)
    return norm
