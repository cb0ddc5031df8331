"""Phases of a run, with other shares of its sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mt_files import Checks

_MAX_WEIGHT = 1e100


@dataclass(frozen=True, kw_only=True)
class PhaseSection:
    """Shares of the sources from a given sample of the run on.

    Attributes:
        from_: Number of the run's samples before the phase.
        from_tokens: Number of tokens before the phase, instead of samples; the phase begins with
            the next whole sample.
        weights: Share of each entry of `data.train`; 0 leaves a source out.
    """

    from_: int | None = None
    from_tokens: int | None = None
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        checks = Checks(self)
        if (self.from_ is None) == (self.from_tokens is None):
            checks.add("from", "set exactly one of from (samples) and from_tokens")
        checks.at_least(0, "from_", "from_tokens")
        checks.done()

    def start(self, sequence_length: int) -> int:
        """Return the number of samples before the phase."""
        if self.from_ is not None:
            return self.from_
        return -(-(self.from_tokens or 0) // sequence_length)


def share_problems(
    weights: Sequence[float], train: Sequence[str], *, may_rest: bool
) -> Iterator[str]:
    """Yield the problems of shares.

    Args:
        weights: The shares; empty for shares in proportion to the numbers of tokens.
        train: The sources.
        may_rest: Whether a share of 0 may leave a source out.
    """
    if weights and len(weights) != len(train):
        yield f"{len(weights)} weights for {len(train)} entries of data.train; give one for each"
    for weight in weights:
        if not 0 <= weight <= _MAX_WEIGHT or (weight == 0 and not may_rest):
            yield f"{weight}: every weight must be greater than 0" + (
                ", or 0 to leave the source out" if may_rest else ""
            )
    if weights and not any(weights):
        yield "all are 0, so nothing would be read; give a source a weight above 0"


def phase_problems(
    phases: Sequence[PhaseSection], train: Sequence[str], weights: Sequence[float]
) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of each problem of a run's phases."""
    if not phases:
        return
    if not train:
        yield "phases", "are for the sources of data.train; leave them out"
        return
    for number, phase in enumerate(phases):
        if not phase.weights:
            text = f"missing; give one for each of the {len(train)} entries of data.train"
            yield f"phases[{number}].weights", text
        for text in share_problems(phase.weights, train, may_rest=True):
            yield f"phases[{number}].weights", text
    if len({phase.from_ is None for phase in phases}) > 1:
        yield "phases", "have both from and from_tokens; use one of them in all phases"
        return
    starts = [phase.start(1) for phase in phases]
    for number, (before, start) in enumerate(pairwise(starts), 1):
        if start <= before:
            text = f"{start} is not behind the phase before, which starts at {before}; "
            yield f"phases[{number}].{_unit(phases)}", text + "write phases in their order"
    if starts[0] == 0 and weights:
        yield "weights", "hold for no sample, as data.phases begin at 0; leave one of them out"


def _unit(phases: Sequence[PhaseSection]) -> str:
    return "from_tokens" if phases[0].from_ is None else "from"
