"""Operations and actions, the parts of a schedule, and how they are read from JSON."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Op(StrEnum):
    """The operation of an action on one micro-batch at one stage."""

    F = "F"
    """Forward of the stage."""
    B = "B"
    """Backward of the stage: gradients of its input and of its weights."""
    I = "I"  # noqa: E741 (the papers' letter)
    """First half of a split backward: the gradient of the stage's input."""
    W = "W"
    """Second half of a split backward: the gradients of the stage's weights."""
    SEND_F = "SEND_F"
    """Send the stage's output to the next stage."""
    RECV_F = "RECV_F"
    """Receive the stage's input from the previous stage."""
    SEND_B = "SEND_B"
    """Send the gradient of the stage's input to the previous stage."""
    RECV_B = "RECV_B"
    """Receive the gradient of the stage's output from the next stage."""

    @property
    def is_send(self) -> bool:
        """Whether the action sends a tensor to another rank."""
        return self in (Op.SEND_F, Op.SEND_B)

    @property
    def is_receive(self) -> bool:
        """Whether the action receives a tensor from another rank."""
        return self in (Op.RECV_F, Op.RECV_B)

    @property
    def is_message(self) -> bool:
        """Whether the action sends or receives."""
        return self in _MESSAGES

    @property
    def is_compute(self) -> bool:
        """Whether the action computes: F, B, I or W."""
        return self in _COMPUTE


_COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W})
_MESSAGES = frozenset({Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B})


class Action(NamedTuple):
    """One step of one rank.

    Attributes:
        op: The operation.
        stage: The stage that it belongs to.
        microbatch: Index of the micro-batch.
    """

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.op.value}{self.microbatch} of stage {self.stage}"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


LARGEST = 2**21
"""Largest product of stages and micro-batches: some six million actions, a gigabyte."""


def require_positive(what: str, value: Any, most: int = LARGEST) -> int:
    """Return `value` if it is a whole number from 1 to `most`, else raise ValueError."""
    if not _is_int(value) or value < 1:
        raise ValueError(f"{what} is {value!r:.60}: expected a whole number of at least 1")
    if value > most:
        raise ValueError(f"{what} is {value:,}: expected at most {most:,}")
    return value


def require_size(stages: Any, microbatches: Any) -> None:
    """Raise ValueError if a schedule would be too large to be made."""
    require_positive("stages", stages)
    require_positive("microbatches", microbatches)
    if stages * microbatches > LARGEST:
        raise ValueError(
            f"{stages:,} stages times {microbatches:,} micro-batches are too many for one "
            f"schedule: the product may be at most {LARGEST:,}"
        )


def require_kind(value: Any, kind: type[T]) -> T:
    """Return a value of the wanted class, or raise TypeError."""
    if not isinstance(value, kind):
        raise TypeError(f"expected a {kind.__name__}, got {value!r:.60} ({type(value).__name__})")
    return value


def read_list(value: Any, where: str, read: Callable[[Any, str], T]) -> tuple[T, ...]:
    """Read a JSON list, each item by `read`."""
    if not isinstance(value, list):
        # A bad document is a bad value, whatever type is found in it.
        raise ValueError(f"{where} is {value!r:.80}: expected a list")  # noqa: TRY004
    return tuple(read(item, f"{where}[{index}]") for index, item in enumerate(value))


def read_int(value: Any, where: str) -> int:
    """Read a whole number."""
    if not _is_int(value):
        raise ValueError(f"{where} is {value!r:.80}: expected a whole number")
    return value


def read_actions(value: Any, where: str) -> tuple[Action, ...]:
    """Read a list of `[op, stage, microbatch]`."""
    return read_list(value, where, _read_action)


def read_pair(value: Any, where: str) -> tuple[Action, Action]:
    """Read a list of two actions."""
    actions = read_actions(value, where)
    if len(actions) != 2:
        raise ValueError(f"{where} has {len(actions)} actions: expected two")
    return actions[0], actions[1]


def _read_action(value: Any, where: str) -> Action:
    ops = [op.value for op in Op]
    fits = isinstance(value, list) and len(value) == 3 and _is_int(value[1]) and _is_int(value[2])
    if not fits or value[0] not in ops:
        raise ValueError(
            f"{where} is {value!r:.80}: expected [op, stage, microbatch] with op one of "
            f"{', '.join(ops)}"
        )
    return Action(Op(value[0]), value[1], value[2])
