"""A pipeline schedule as a value: what each rank does, in which order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

_FORMAT = "mt-pipeline-schedule"
_VERSION = 1


class Op(StrEnum):
    """What one action does to one micro-batch at one stage."""

    F = "F"
    """Forward of the stage."""
    B = "B"
    """Backward of the stage: gradients of its input and of its weights."""
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
    def is_compute(self) -> bool:
        """Whether the action computes, rather than communicates."""
        return self is Op.F or self is Op.B


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank.

    Attributes:
        op: What is done.
        stage: The stage whose forward, backward, input or output it is.
        microbatch: Index of the micro-batch.
    """

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.op.value}{self.microbatch} of stage {self.stage}"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The actions of every pipeline rank, in the order in which the rank takes them.

    A schedule need not be right to be a value: `check` says what is wrong with it.

    Attributes:
        name: What the schedule is called in the literature.
        stages: Number of stages the model is cut into.
        microbatches: Number of micro-batches of one optimizer step.
        ranks: For each pipeline rank its actions in order. Generators give compute actions only;
            `insert_communication` adds the sends and receives.
        stage_ranks: For each stage the rank that holds it. Default: round robin, stage `s` on
            rank `s % len(ranks)`, which is the identity when each rank holds one stage.
        peak_activations: For each rank the most (stage, micro-batch) pairs whose forward has run
            and whose backward has not: the memory that the schedule promises to stay within.
            None: no promise, so `check` does not look.

    Raises:
        ValueError: A size is below 1, or a per-rank or per-stage tuple does not fit.
    """

    name: str
    stages: int
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...] = field(repr=False)
    stage_ranks: tuple[int, ...] = ()
    peak_activations: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for what in ("stages", "microbatches"):
            require_positive(what, getattr(self, what))
        if not self.ranks:
            raise ValueError("ranks is empty: a schedule has at least one rank")
        if not self.stage_ranks:
            placement = tuple(s % len(self.ranks) for s in range(self.stages))
            object.__setattr__(self, "stage_ranks", placement)
        if len(self.stage_ranks) != self.stages:
            raise ValueError(
                f"stage_ranks has {len(self.stage_ranks)} entries for {self.stages} stages: "
                "give the rank of every stage, or leave it out for round robin"
            )
        outside = [r for r in self.stage_ranks if not 0 <= r < len(self.ranks)]
        if outside:
            raise ValueError(
                f"stage_ranks names rank {outside[0]}, but the schedule has ranks "
                f"0..{len(self.ranks) - 1}"
            )
        if self.peak_activations is not None and len(self.peak_activations) != len(self.ranks):
            raise ValueError(
                f"peak_activations has {len(self.peak_activations)} entries for "
                f"{len(self.ranks)} ranks: give one per rank, or None for no promise"
            )

    @cached_property
    def has_communication(self) -> bool:
        """Whether sends and receives are among the actions."""
        return any(not action.op.is_compute for actions in self.ranks for action in actions)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds, in ascending order."""
        return [stage for stage, holder in enumerate(self.stage_ranks) if holder == rank]

    def next_stage(self, stage: int) -> int | None:
        """The stage that takes this one's output, None for the last."""
        return stage + 1 if stage + 1 < self.stages else None

    def previous_stage(self, stage: int) -> int | None:
        """The stage whose output this one takes, None for the first."""
        return stage - 1 if stage > 0 else None

    def peer(self, action: Action) -> int | None:
        """The rank at the other end of the edge that an action's data takes.

        Args:
            action: F, SEND_F and RECV_B look at the next stage; B, SEND_B and RECV_F at the
                previous one.

        Returns:
            None at the two ends of the model, where both stages are on one rank, and for a stage
            that does not exist.
        """
        if not 0 <= action.stage < self.stages:
            return None
        downstream = action.op in (Op.F, Op.SEND_F, Op.RECV_B)
        other = (self.next_stage if downstream else self.previous_stage)(action.stage)
        if other is None or self.stage_ranks[other] == self.stage_ranks[action.stage]:
            return None
        return self.stage_ranks[other]

    def other_end(self, message: Action) -> Action:
        """The receive that a send belongs to, or the send that a receive belongs to.

        Raises:
            ValueError: The action does not communicate, or there is no stage at that side.
        """
        ends = {
            Op.SEND_F: (Op.RECV_F, self.next_stage),
            Op.RECV_F: (Op.SEND_F, self.previous_stage),
            Op.SEND_B: (Op.RECV_B, self.previous_stage),
            Op.RECV_B: (Op.SEND_B, self.next_stage),
        }
        op, neighbour = ends.get(message.op, (message.op, None))
        stage = None if neighbour is None else neighbour(message.stage)
        if stage is None:
            raise ValueError(f"{message} has no other end")
        return Action(op, stage, message.microbatch)

    def __iter__(self) -> Iterator[tuple[int, int, Action]]:
        """Every action with its rank and its index in that rank's list."""
        for rank, actions in enumerate(self.ranks):
            for index, action in enumerate(actions):
                yield rank, index, action

    def __str__(self) -> str:
        """The orders in the papers' notation: `F3` is the forward of micro-batch 3.

        Where a rank holds several stages, a letter says which: `F3b` runs in its second one.
        """
        head = f"{self.name}: {self.stages} stages, {self.microbatches} micro-batches"
        width = len(str(len(self.ranks) - 1))
        lines = [
            f"rank {rank:>{width}}: " + " ".join(self._mark(rank, a) for a in actions)
            for rank, actions in enumerate(self.ranks)
        ]
        return "\n".join([head, *lines])

    def _mark(self, rank: int, action: Action) -> str:
        held = self.stages_of(rank)
        if held == [action.stage]:
            return f"{action.op.value}{action.microbatch}"
        if action.stage not in held:  # only in a schedule that `check` finds fault with
            return f"{action.op.value}{action.microbatch}@{action.stage}"
        chunk = held.index(action.stage)
        letter = chr(ord("a") + chunk) if chunk < 26 else f".{chunk}"
        return f"{action.op.value}{action.microbatch}{letter}"

    def to_json(self) -> str:
        """The schedule as JSON text that `from_json` reads back to an equal value."""
        peak = self.peak_activations
        return json.dumps(
            {
                "format": _FORMAT,
                "version": _VERSION,
                "name": self.name,
                "stages": self.stages,
                "microbatches": self.microbatches,
                "stage_ranks": list(self.stage_ranks),
                "peak_activations": None if peak is None else list(peak),
                "ranks": [[[a.op.value, a.stage, a.microbatch] for a in r] for r in self.ranks],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Read what `to_json` wrote.

        Args:
            text: JSON text. It may come from anywhere: nothing in it is evaluated.

        Raises:
            ValueError: The text is not JSON, not such a document, of another version, or a field
                has the wrong type; the message names the field.
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not a JSON schedule: {error}") from error
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise ValueError(f'not a schedule: expected an object with "format": "{_FORMAT}"')
        if document.get("version") != _VERSION:
            raise ValueError(
                f"schedule version {document.get('version')!r} is not supported: "
                f"this package reads version {_VERSION}"
            )
        _require("name", document.get("name"), str, "a string")
        peak = document.get("peak_activations")
        return cls(
            name=document["name"],
            stages=require_positive("stages", document.get("stages")),
            microbatches=require_positive("microbatches", document.get("microbatches")),
            ranks=tuple(
                tuple(
                    _read_action(item, f"ranks[{rank}][{index}]")
                    for index, item in enumerate(_read_list(actions, f"ranks[{rank}]"))
                )
                for rank, actions in enumerate(_read_list(document.get("ranks"), "ranks"))
            ),
            stage_ranks=_read_ints(document.get("stage_ranks"), "stage_ranks"),
            peak_activations=None if peak is None else _read_ints(peak, "peak_activations"),
        )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def require_positive(what: str, value: Any) -> int:
    """Return `value` where it is a whole number of at least 1, else raise ValueError."""
    if not _is_int(value) or value < 1:
        raise ValueError(f"{what} is {value!r}: expected a whole number of at least 1")
    return value


def _require(where: str, value: Any, kind: type, described: str) -> None:
    if not isinstance(value, kind):
        # A bad document is a bad value, whatever type is found in it.
        raise ValueError(f"{where} is {value!r:.80}: expected {described}")  # noqa: TRY004


def _read_list(value: Any, where: str) -> Sequence[Any]:
    _require(where, value, list, "a list")
    return value


def _read_ints(value: Any, where: str) -> tuple[int, ...]:
    items = _read_list(value, where)
    for index, item in enumerate(items):
        if not _is_int(item):
            raise ValueError(f"{where}[{index}] is {item!r:.80}: expected a whole number")
    return tuple(items)


def _read_action(value: Any, where: str) -> Action:
    ops = [op.value for op in Op]
    fits = isinstance(value, list) and len(value) == 3 and _is_int(value[1]) and _is_int(value[2])
    if not fits or value[0] not in ops:
        raise ValueError(
            f"{where} is {value!r:.80}: expected [op, stage, microbatch] with op one of "
            f"{', '.join(ops)}"
        )
    return Action(Op(value[0]), value[1], value[2])
