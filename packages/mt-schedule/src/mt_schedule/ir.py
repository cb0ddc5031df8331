"""A pipeline schedule as a value: the actions of each rank, in order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from mt_schedule.action import (
    Action,
    Op,
    read_actions,
    read_int,
    read_list,
    read_pair,
    require_positive,
    require_size,
)

_FORMAT = "mt-schedule"
_VERSION = 1
_OTHER_END = MappingProxyType(
    {
        Op.SEND_F: Op.RECV_F,
        Op.RECV_F: Op.SEND_F,
        Op.SEND_B: Op.RECV_B,
        Op.RECV_B: Op.SEND_B,
    }
)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The actions of every pipeline rank, in the order in which the rank takes them.

    A `Schedule` may be wrong: `check` finds its errors.

    Stages are numbered in the order in which data passes them. With two `directions` (DualPipe)
    there are two copies of the model: stages `0 .. depth - 1` are one copy and stages
    `depth .. 2 * depth - 1` the other. Stages `s` and `depth + s` have the same parameters, and
    each direction takes half of the micro-batches.

    Attributes:
        name: Name of the schedule in the literature.
        stages: Number of stages on all ranks and in all directions.
        microbatches: Number of micro-batches of one optimizer step.
        ranks: The actions of each pipeline rank in order. Generators return compute actions only;
            `insert_communication` adds the sends and receives.
        stage_ranks: The rank of each stage. The default is round robin, stage `s` on rank
            `s % len(ranks)`, which is the identity if each rank holds one stage.
        peak_activations: For each rank, the largest number of (stage, micro-batch) pairs whose
            forward has run and whose backward (B, or W if it is split) has not. The schedule
            promises to stay within it; None makes no promise, and `check` skips it.
        directions: Number of copies of the model that data flows through.
        pairs: Pairs of an F and the B or I that follows it on the same rank, to be run as one:
            both inputs are needed at its start, and both outputs leave at its end. Taking the two
            in order is right too, so an executor without overlap may ignore this, and a pair with
            another action in between is taken in order. `check` requires both actions on one rank
            and in no other pair.

    Raises:
        ValueError: A size is below 1 or too large, a per-rank or per-stage tuple does not fit, or
            two actions cannot be a pair.
        TypeError: `ranks` does not consist of tuples of actions.
    """

    name: str
    stages: int
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...] = field(repr=False)
    stage_ranks: tuple[int, ...] = ()
    peak_activations: tuple[int, ...] | None = None
    directions: int = 1
    pairs: frozenset[tuple[Action, Action]] = field(default=frozenset(), repr=False)

    def __post_init__(self) -> None:
        require_size(self.stages, self.microbatches)
        require_positive("directions", self.directions)
        if not self.ranks:
            raise ValueError("ranks is empty: a schedule has at least one rank")
        for rank, actions in enumerate(self.ranks):
            if not isinstance(actions, tuple) or any(type(each) is not Action for each in actions):
                raise TypeError(f"ranks[{rank}] is {actions!r:.60}: expected a tuple of actions")
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
                f"{len(self.ranks)} ranks: give one per rank, or None"
            )
        for what, size in (("stages", self.stages), ("microbatches", self.microbatches)):
            if size % self.directions:
                raise ValueError(
                    f"{what} is {size}, not a multiple of the {self.directions} directions: "
                    f"use a multiple of {self.directions}"
                )
        for first, second in self.pairs:
            if first.op is not Op.F or second.op not in (Op.B, Op.I):
                raise ValueError(f"{first} cannot overlap {second}: it takes an F and a B or I")

    @cached_property
    def has_communication(self) -> bool:
        """Whether sends and receives are among the actions."""
        return any(action.op.is_message for actions in self.ranks for action in actions)

    @property
    def depth(self) -> int:
        """Number of stages that a micro-batch passes, which is the number of the model's stages."""
        return self.stages // self.directions

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, in ascending order."""
        return [stage for stage, holder in enumerate(self.stage_ranks) if holder == rank]

    def microbatches_of(self, stage: int) -> range:
        """Return the micro-batches that pass a stage: all, or the share of its direction."""
        share = self.microbatches // self.directions
        direction = stage // self.depth
        return range(direction * share, (direction + 1) * share)

    def replicas_of(self, stage: int) -> list[int]:
        """Return all stages with the same parameters as this one, including itself."""
        return list(range(stage % self.depth, self.stages, self.depth))

    def next_stage(self, stage: int) -> int | None:
        """Return the stage that takes this one's output; None for the last of its direction."""
        return stage + 1 if (stage + 1) % self.depth else None

    def previous_stage(self, stage: int) -> int | None:
        """Return the stage whose output this one takes; None for the first of its direction."""
        return stage - 1 if stage % self.depth else None

    def is_split(self, stage: int, microbatch: int) -> bool:
        """Return whether the backward of a stage and micro-batch is an I and a W, not a B."""
        return (stage, microbatch) in self._split

    @cached_property
    def _split(self) -> frozenset[tuple[int, int]]:
        return frozenset((a.stage, a.microbatch) for _, _, a in self if a.op is Op.I)

    @cached_property
    def pair_of(self) -> Mapping[Action, Action]:
        """The B or I that overlaps with each overlapped F."""
        return MappingProxyType(dict(self.pairs))

    def peer(self, action: Action) -> int | None:
        """Return the rank that an action's data comes from or goes to.

        Args:
            action: F, SEND_F and RECV_B concern the next stage; B, I, SEND_B and RECV_F concern the
                previous one.

        Returns:
            The rank; None at the two ends of the model, if both stages are on one rank, for a
            nonexistent stage, and for W.
        """
        if not 0 <= action.stage < self.stages or action.op is Op.W:
            return None
        other = self._neighbour(action)
        if other is None or self.stage_ranks[other] == self.stage_ranks[action.stage]:
            return None
        return self.stage_ranks[other]

    def other_end(self, message: Action) -> Action:
        """Return the receive of a send, or the send of a receive.

        Raises:
            ValueError: The action does not communicate, or there is no stage at that side.
        """
        stage = self._neighbour(message) if message.op in _OTHER_END else None
        if stage is None:
            raise ValueError(f"{message} has no other end")
        return Action(_OTHER_END[message.op], stage, message.microbatch)

    def _neighbour(self, action: Action) -> int | None:
        downstream = action.op in (Op.F, Op.SEND_F, Op.RECV_B)
        return (self.next_stage if downstream else self.previous_stage)(action.stage)

    def __iter__(self) -> Iterator[tuple[int, int, Action]]:
        """Yield every action with its rank and its index in that rank's list."""
        for rank, actions in enumerate(self.ranks):
            for index, action in enumerate(actions):
                yield rank, index, action

    def __str__(self) -> str:
        """Return the orders in the papers' notation: `F3` is the forward of micro-batch 3.

        If a rank holds several stages, a letter names the stage: `F3b` runs in its second one.
        `F3&B1` is an overlapped pair.
        """
        head = f"{self.name}: {self.stages} stages, {self.microbatches} micro-batches"
        width = len(str(len(self.ranks) - 1))
        lines = [
            f"rank {rank:>{width}}: {self._line(rank, actions)}"
            for rank, actions in enumerate(self.ranks)
        ]
        return "\n".join([head, *lines])

    def _line(self, rank: int, actions: Sequence[Action]) -> str:
        marks = [self.notation(rank, action) for action in actions]
        for index, action in enumerate(actions[:-1]):
            if actions[index + 1] == self.pair_of.get(action):
                marks[index : index + 2] = [f"{marks[index]}&{marks[index + 1]}", ""]
        return " ".join(filter(None, marks))

    def notation(self, rank: int, action: Action) -> str:
        """Return the notation of an action on a rank: `F3`, `F3b`."""
        held, mark = self.stages_of(rank), f"{action.op.value}{action.microbatch}"
        if held == [action.stage]:
            return mark
        if action.stage not in held:  # only in a wrong schedule
            return f"{mark}@{action.stage}"
        chunk = held.index(action.stage)
        return mark + (chr(ord("a") + chunk) if chunk < 26 else f".{chunk}")

    def to_json(self) -> str:
        """Return the schedule as JSON text, which `from_json` reads back to an equal value."""
        peak = self.peak_activations
        return json.dumps(
            {
                "format": _FORMAT,
                "version": _VERSION,
                "name": self.name,
                "stages": self.stages,
                "microbatches": self.microbatches,
                "directions": self.directions,
                "stage_ranks": list(self.stage_ranks),
                "peak_activations": None if peak is None else list(peak),
                "pairs": sorted(self.pairs),
                "ranks": self.ranks,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Read the JSON text of `to_json`.

        Args:
            text: JSON text. It may come from an untrusted source: nothing in it is evaluated.

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
                f"schedule version {document.get('version')!r:.60} is not supported: "
                f"this package reads version {_VERSION}"
            )
        name, peak = document.get("name"), document.get("peak_activations")
        if not isinstance(name, str):
            raise ValueError(f"name is {name!r:.80}: expected a string")  # noqa: TRY004
        return cls(
            name=name,
            stages=require_positive("stages", document.get("stages")),
            microbatches=require_positive("microbatches", document.get("microbatches")),
            directions=require_positive("directions", document.get("directions", 1)),
            ranks=read_list(document.get("ranks"), "ranks", read_actions),
            pairs=frozenset(read_list(document.get("pairs", []), "pairs", read_pair)),
            stage_ranks=read_list(document.get("stage_ranks"), "stage_ranks", read_int),
            peak_activations=(
                None if peak is None else read_list(peak, "peak_activations", read_int)
            ),
        )
