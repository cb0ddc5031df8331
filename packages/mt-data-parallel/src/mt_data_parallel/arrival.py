"""The gradients that a step expects, and those that did not come."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from mt_data_parallel.bucket import Slot

Unused = Literal["error", "zero"]

_NAMED = 8  # of the parameters that a message is about


@dataclass(frozen=True)
class Sink:
    """Takes one parameter's gradients from a layer that adds them itself (a `GradSink`).

    Every gradient counts as one of the backwards that `GradBuffer.start` announced.

    Attributes:
        begin: Returns the tensor for the gradient, and whether to add it there; raises RuntimeError
            outside of `start` and `finish`, or if more gradients come than announced.
        end: Counts the gradient, and launches the buckets that it completes.
    """

    begin: Callable[[], tuple[Tensor, bool]]
    end: Callable[[], None]


def announced(num_backwards: int | Mapping[str, int], names: Collection[str]) -> Mapping[str, int]:
    """Return the number of gradients that each parameter is going to get.

    Raises:
        ValueError: A parameter gets none, or has no entry.
    """
    if isinstance(num_backwards, Mapping):
        expected = num_backwards
    else:
        expected = dict.fromkeys(names, num_backwards)
    missing = [name for name in names if name not in expected]
    if missing:
        raise ValueError(f"num_backwards has no entry for {missing[0]!r}; name every parameter")
    fewest = min((expected[name] for name in names), default=1)
    if fewest < 1:
        raise ValueError(f"num_backwards must be at least 1, got {fewest}")
    return expected


def missing_gradients(slots: Sequence[Slot], unused: Unused) -> str:
    """Describe the missing gradients; empty if there are none."""
    if slots and all(0 < slot.accumulated < slot.expected for slot in slots):
        most = max(slots, key=lambda slot: slot.accumulated)
        return (
            f"start() was told to expect {most.expected} backward passes, and finish() came "
            f"after {most.accumulated}; call finish() after the last one, or give start() the "
            "true number"
        )
    names = [slot.name for slot in slots if slot.accumulated == 0]
    if unused == "zero" or not names:
        return ""
    if len(names) == len(slots):
        return "finish() came before any gradient; call it after the step's last backward"
    listed = ", ".join(map(repr, names[:_NAMED])) + (", ..." if len(names) > _NAMED else "")
    return (
        f"{len(names)} of {len(slots)} parameters got no gradient on this rank: {listed}. The "
        "loss does not depend on them: freeze them with requires_grad_(False) before the "
        "GradBuffer is made, or, where only some samples use them, make it with unused='zero'"
    )
