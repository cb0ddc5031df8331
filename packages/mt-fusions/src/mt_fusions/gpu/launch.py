"""How large the tiles of a launch are, and how many programs it has."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """What one program holds in registers.

    Attributes:
        rows: A power of two.
        columns: The whole row, rounded up to a power of two.
        warps: Threads of the program, in groups of 32.
    """

    rows: int
    columns: int
    warps: int


def row_tiles(size: int, elements: int = 2048) -> Tile:
    """Choose a tile of whole rows: one long row, or short ones until there are some elements."""
    columns = max(16, 1 << (size - 1).bit_length())
    rows = max(1, elements // columns)
    warps = min(32, max(4, rows * columns // 512))
    return Tile(rows, columns, warps)


def programs(tiles: int, device: torch.device, waves: int = 2) -> int:
    """How many programs share the tiles where each keeps a sum: a few for every processor."""
    return min(tiles, waves * _processors(device))


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
