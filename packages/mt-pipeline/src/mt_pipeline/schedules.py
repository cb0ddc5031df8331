"""Generators of schedules: small pure functions, each named after its paper.

A generator emits compute actions only (`F`, `B`); communication is inserted by a pass.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from mt_pipeline.action import Action, Op, require_positive
from mt_pipeline.ir import Schedule


def one_forward_one_backward(stages: int, microbatches: int) -> Schedule:
    """1F1B: after a warm-up, each rank alternates one forward and one backward.

    PipeDream-Flush of Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training",
    arXiv 2006.09503, figure 4 of "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM", arXiv 2104.04473. With p stages and m micro-batches, rank r starts with
    `min(p - r - 1, m)` forwards, holds at most `min(p - r, m)` activations, and the whole takes
    `(m + p - 1)(t_F + t_B)`. One stage is plain gradient accumulation: F0 B0 F1 B1 ...

    Args:
        stages: Number of stages, p; one per rank.
        microbatches: Number of micro-batches, m; any number, also fewer than stages.

    Returns:
        The schedule, with its peak declared.
    """
    ranks = []
    for rank in range(stages):
        warmup = min(stages - rank - 1, microbatches)
        forwards = [Action(Op.F, rank, i) for i in range(microbatches)]
        backwards = [Action(Op.B, rank, i) for i in range(microbatches)]
        steady = zip(forwards[warmup:], backwards, strict=False)
        ranks.append(
            (
                *forwards[:warmup],
                *(action for pair in steady for action in pair),
                *backwards[microbatches - warmup :],
            )
        )
    return Schedule(
        name="1f1b",
        stages=stages,
        microbatches=microbatches,
        ranks=tuple(ranks),
        peak_activations=tuple(min(stages - rank, microbatches) for rank in range(stages)),
    )


_GENERATORS: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {"1f1b": one_forward_one_backward}
)


def make_schedule(name: str, stages: int = 4, microbatches: int = 8, **options: Any) -> Schedule:
    """Make a schedule by name.

    Args:
        name: `1f1b` (one stage is the no-pipeline case).
        stages: Number of pipeline ranks.
        microbatches: Number of micro-batches of one optimizer step.
        **options: Further arguments of the named generator; `1f1b` has none.

    Returns:
        The schedule, without communication.

    Raises:
        ValueError: Unknown name, unknown option, or a size below 1.

    Example:
        >>> print(make_schedule("1f1b", stages=2, microbatches=3))
        1f1b: 2 stages, 3 micro-batches
        rank 0: F0 F1 B0 F2 B1 B2
        rank 1: F0 B0 F1 B1 F2 B2
    """
    generator = _GENERATORS.get(name)
    if generator is None:
        raise ValueError(
            f"unknown schedule {name!r}.{_suggest(name)} Known: {_listed(_GENERATORS)}"
        )
    allowed = [p for p in inspect.signature(generator).parameters if p not in _SIZES]
    for option in options:
        if option not in allowed:
            raise ValueError(
                f"schedule {name!r} has no option {option!r}; its options: {_listed(allowed)}"
            )
    for what, size in zip(_SIZES, (stages, microbatches), strict=True):
        require_positive(what, size)
    return generator(stages, microbatches, **options)


_SIZES = ("stages", "microbatches")


def _suggest(name: str) -> str:
    close = difflib.get_close_matches(str(name).lower(), _GENERATORS, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def _listed(names: Any) -> str:
    return ", ".join(names) or "none"
