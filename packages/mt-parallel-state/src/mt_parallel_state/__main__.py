"""`python -m mt_parallel_state --tp 2 --pp 2 --world-size 16` prints a layout as a table."""

from __future__ import annotations

import argparse
import sys

from mt_parallel_state.layout import AXES, ParallelLayout

_GROUPS = ("tp", "cp", "dp", "pp", "dp-cp", "tp-cp", "tp-pp", "ep", "edp", "tp-ep-pp", "embedding")
_MOST_ROWS = 64


def table(layout: ParallelLayout) -> str:
    """Return where each rank sits, and the groups of more than one rank."""
    widest = len(str(layout.world_size - 1))
    lines = [f"{layout}", f"{'rank':>{widest + 4}}" + "".join(f"{axis:>5}" for axis in AXES)]
    for rank in range(min(layout.world_size, _MOST_ROWS)):
        at = layout.coordinates(rank)
        lines.append(f"{rank:>{widest + 4}}" + "".join(f"{at[axis]:>5}" for axis in AXES))
    if layout.world_size > _MOST_ROWS:
        lines.append(f"... and {layout.world_size - _MOST_ROWS} more")
    lines.append("")
    for axes in _GROUPS:
        if layout.size(axes) > 1:
            groups = layout.groups(axes)
            shown = " ".join(_short(group) for group in groups[:4])
            more = f" ... {len(groups)} groups" if len(groups) > 4 else ""
            lines.append(f"{axes:>9}  {shown}{more}")
    return "\n".join(lines)


def _short(ranks: list[int]) -> str:
    shown = ",".join(map(str, ranks if len(ranks) <= 8 else ranks[:8]))
    return "{" + shown + (",..." if len(ranks) > 8 else "") + "}"


def main(arguments: list[str] | None = None) -> int:
    """Parse sizes and print the table; return 2 when they do not fit."""
    parser = argparse.ArgumentParser(prog="python -m mt_parallel_state", description=__doc__)
    for axis in ("tp", "cp", "ep", "pp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--dp", type=int, help="derived from --world-size if left out")
    parser.add_argument("--etp", type=int, help="tp without experts, else 1, if left out")
    parser.add_argument("--world-size", type=int, help="tp x cp x dp x pp if left out")
    parser.add_argument("--order", default="tp-cp-ep-dp-pp")
    given = parser.parse_args(arguments)
    try:
        print(table(_layout(given)))  # noqa: T201 - this is the command's output
    except ValueError as error:
        print(f"mt_parallel_state: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


def _layout(given: argparse.Namespace) -> ParallelLayout:
    sizes = {name: getattr(given, name) for name in ("tp", "cp", "ep", "pp", "etp", "order")}
    if given.world_size is None:
        return ParallelLayout(dp=1 if given.dp is None else given.dp, **sizes)
    layout = ParallelLayout.fit(given.world_size, **sizes)
    if given.dp not in (None, layout.dp):
        raise ValueError(
            f"--dp {given.dp} contradicts --world-size {given.world_size}, which leaves "
            f"dp={layout.dp}; leave one of them out"
        )
    return layout


if __name__ == "__main__":
    sys.exit(main())
