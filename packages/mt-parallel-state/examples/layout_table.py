"""Prints where every rank of a layout sits, and the groups it belongs to.

python layout_table.py tp=2 dp=2 pp=2 ep=2
"""

from __future__ import annotations

import sys

from mt_parallel_state import ParallelLayout


def table(layout: ParallelLayout) -> str:
    axes = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")
    lines = ["rank " + "".join(f"{axis:>5}" for axis in axes) + "   tp group    pp group"]
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        row = "".join(f"{at[axis]:>5}" for axis in axes)
        tp, pp = layout.group_of("tp", rank), layout.group_of("pp", rank)
        lines.append(f"{rank:>4} {row}   {tp!s:<11} {pp}")
    return "\n".join(lines)


def main() -> None:
    words = sys.argv[1:] or ["tp=2", "dp=2", "pp=2", "ep=2"]
    layout = ParallelLayout(**{name: int(size) for name, size in (w.split("=") for w in words)})
    print(layout)
    print(table(layout))
    for axes in ("dp-cp", "ep", "edp", "embedding"):
        print(f"{axes:>10}: {layout.groups(axes)}")


if __name__ == "__main__":
    main()
