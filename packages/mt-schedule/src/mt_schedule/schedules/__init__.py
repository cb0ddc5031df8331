"""Generators of schedules: small pure functions, each named after its paper.

A generator returns a schedule of compute actions only, with its peak declared; a pass inserts
communication.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from mt_schedule.action import require_positive, require_size
from mt_schedule.ir import Schedule
from mt_schedule.schedules.bidirectional import dualpipe, dualpipe_v
from mt_schedule.schedules.looped import interleaved, looped_bfs
from mt_schedule.schedules.one_pass import gpipe, one_forward_one_backward
from mt_schedule.schedules.v_shape import v_half, v_min, zb_v
from mt_schedule.schedules.zero_bubble import zb_h1, zb_h2

_GENERATORS: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_forward_one_backward,
        "interleaved": interleaved,
        "bfs": looped_bfs,
        "zb-h1": zb_h1,
        "zb-h2": zb_h2,
        "zb-v": zb_v,
        "v-half": v_half,
        "v-min": v_min,
        "dualpipe": dualpipe,
        "dualpipe-v": dualpipe_v,
    }
)
SCHEDULES = tuple(_GENERATORS)
"""The names that `make_schedule` knows."""


def make_schedule(name: str, stages: int = 4, microbatches: int = 8, **options: Any) -> Schedule:
    """Make a schedule by name.

    Args:
        name: One of `gpipe`, `1f1b` (with one stage the no-pipeline case), `interleaved`, `bfs`,
            `zb-h1`, `zb-h2`, `zb-v`, `v-half`, `v-min`, `dualpipe`, `dualpipe-v`.
        stages: Number of pipeline ranks. Those that place several stages on a rank have more
            stages than this.
        microbatches: Number of micro-batches of one optimizer step.
        **options: Further arguments of the named generator: `chunks` (stages on each rank) of
            `interleaved` and `bfs`, `group` of `interleaved`, `overlap` (pairs of a forward and a
            backward that hide the all-to-alls of experts) of `1f1b` and `interleaved`.

    Returns:
        The schedule, without communication.

    Raises:
        ValueError: Unknown name, unknown option, or a size that the schedule cannot take.

    Example:
        >>> print(make_schedule("1f1b", stages=2, microbatches=3))
        1f1b: 2 stages, 3 micro-batches
        rank 0: F0 F1 B0 F2 B1 B2
        rank 1: F0 B0 F1 B1 F2 B2
    """
    generator = _GENERATORS.get(name) if isinstance(name, str) else None
    if generator is None:
        raise ValueError(
            f"unknown schedule {name!r:.60}.{_suggest(name)} Known: {_listed(SCHEDULES)}"
        )
    allowed = [p for p in inspect.signature(generator).parameters if p not in _SIZES]
    for option in options:
        if option not in allowed:
            raise ValueError(
                f"schedule {name!r} has no option {option!r}; its options: {_listed(allowed)}"
            )
    require_size(stages, microbatches)
    require_size(stages * require_positive("chunks", options.get("chunks", 1)), microbatches)
    return generator(stages, microbatches, **options)


_SIZES = ("stages", "microbatches")


def _suggest(name: str) -> str:
    close = difflib.get_close_matches(str(name).lower(), SCHEDULES, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def _listed(names: Any) -> str:
    return ", ".join(names) or "none"
