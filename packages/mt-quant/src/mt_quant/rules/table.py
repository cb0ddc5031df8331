"""Plain-text tables."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], *, right: int | None = None) -> str:
    """Return aligned lines, two spaces between columns.

    Args:
        rows: Cells, the header first.
        right: Index of the first right-aligned column, for numbers; None aligns all left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first = len(widths) if right is None else right
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < first else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
