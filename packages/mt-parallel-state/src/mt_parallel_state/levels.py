"""Groups cut into levels: neighbours first, then across them.

One primitive serves two uses. Sharding inside an instance and replication across instances
(HSDP): two levels of `dp-cp`. Hierarchical context parallelism: levels of `cp`, the inner ones
on fast links.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from mt_files import check_type


def cut_into_levels(ranks: Sequence[int], sizes: Sequence[int]) -> list[list[list[int]]]:
    """Cut one group into levels whose sizes multiply to its own.

    Level 0 holds neighbours; level i holds the ranks at the same place in neighbouring groups of
    the levels below. Each level partitions the group.

    Args:
        ranks: The group.
        sizes: Ranks in a group of each level, innermost first.

    Returns:
        For each level its groups, ordered by their first rank.

    Raises:
        ValueError: A size is below 1, or they do not multiply to the size of the group.

    Example:
        >>> cut_into_levels(range(8), (2, 2, 2))[1]
        [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    for size in sizes:
        check_type("a level size", size, int)
    if not sizes or any(size < 1 for size in sizes) or prod(sizes) != len(ranks):
        raise ValueError(
            f"level sizes {tuple(sizes)} multiply to {prod(sizes)}, but the group has "
            f"{len(ranks)} ranks; choose sizes of 1 or more whose product is {len(ranks)}"
        )
    levels: list[list[list[int]]] = []
    stride = 1
    for size in sizes:
        starts = [i for i in range(len(ranks)) if i // stride % size == 0]
        levels.append([[ranks[i + j * stride] for j in range(size)] for i in starts])
        stride *= size
    return levels
