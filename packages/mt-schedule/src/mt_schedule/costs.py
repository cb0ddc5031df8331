"""Costs of the actions of a schedule: times, bytes and links between ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mt_schedule.action import require_positive

_PER_STAGE = ("forward", "backward", "weight", "activation_bytes", "message_bytes")


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of the stages of a model, in the order in which data passes them, in any unit of time.

    A single number applies to all stages; a sequence has one number for each stage.

    Attributes:
        forward: Time of one F.
        backward: Time of one B: input and weight gradients together.
        weight: Time of one W, which is a part of `backward`. None means half of it, also after
            `dataclasses.replace(costs, backward=...)`; `merged` returns the numbers.
        activation_bytes: Memory that a stage keeps for one micro-batch between its forward and the
            end of its backward.
        message_bytes: Size of a stage's output for one micro-batch, and of its gradient.
        latency: Time from the end of a transfer to its arrival.
        bandwidth: Bytes that one rank sends to another in a unit of time. Each direction of each
            pair of ranks has a separate link, on which messages queue.
        pair_share: Time of an overlapped pair as a share of the sum of its two times.

    Raises:
        ValueError: A number is negative or not finite, two sequences differ in length, or
            `weight` is more than `backward`.
    """

    forward: float | Sequence[float] = 1.0
    backward: float | Sequence[float] = 2.0
    weight: float | Sequence[float] | None = None
    activation_bytes: float | Sequence[float] = 0.0
    message_bytes: float | Sequence[float] = 0.0
    latency: float = 0.0
    bandwidth: float = math.inf
    pair_share: float = 1.0

    def __post_init__(self) -> None:
        lengths: dict[str, int] = {}
        for what in _PER_STAGE:
            given = getattr(self, what)
            if what == "weight" and given is None:
                continue
            numbers = (given,) if isinstance(given, int | float) else tuple(given)
            if any(not 0 <= number < math.inf for number in numbers):
                raise ValueError(f"{what} is {given}: expected numbers of 0 or more")
            if not isinstance(given, int | float):
                object.__setattr__(self, what, tuple(float(number) for number in numbers))
                lengths[what] = len(numbers)
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{what} {length}" for what, length in lengths.items())
            raise ValueError(f"costs of different numbers of stages: {listed}; give one per stage")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency is {self.latency}: expected 0 or more")
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth is {self.bandwidth}: expected more than 0")
        if not 0 < self.pair_share < math.inf:
            raise ValueError(f"pair_share is {self.pair_share}: expected more than 0")
        size = next(iter(lengths.values()), 1)
        pairs = zip(self._listed("weight", size), self._listed("backward", size), strict=True)
        for stage, (weight, backward) in enumerate(pairs):
            if weight > backward:
                raise ValueError(
                    f"weight is {weight} and backward {backward} at stage {stage}: backward is "
                    "the time of both gradients, so weight is a part of it"
                )

    @property
    def stages(self) -> int | None:
        """Number of stages of the costs; None if every cost is a single number."""
        given = (getattr(self, what) for what in _PER_STAGE)
        return next((len(value) for value in given if isinstance(value, tuple)), None)

    def merged(self, stages: int) -> Costs:
        """Return costs with one number for each of `stages` stages, joining neighbours.

        Times and activations add up; a joined stage sends the message of its last part.

        Raises:
            ValueError: `stages` does not divide the number of stages of the costs.
        """
        require_positive("stages", stages)
        have = self.stages or stages
        if have % stages:
            raise ValueError(f"{have} stages cannot be joined to {stages}: use a divisor of {have}")
        each = have // stages
        joined: dict[str, tuple[float, ...]] = {}
        for what in _PER_STAGE:
            numbers = self._listed(what, have)
            parts = [numbers[start : start + each] for start in range(0, have, each)]
            joined[what] = tuple(p[-1] if what == "message_bytes" else sum(p) for p in parts)
        return replace(self, **joined)

    def _listed(self, what: str, stages: int) -> list[float]:
        value = getattr(self, what)
        if value is None:  # only `weight` may be None
            return [time / 2 for time in self._listed("backward", stages)]
        return [float(value)] * stages if isinstance(value, int | float) else list(value)
