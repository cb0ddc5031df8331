"""Dynamic context parallelism: every document gets as many ranks as its length needs.

A batch of documents of very different lengths, all split over all ranks, sends the keys of short
documents round for nothing. Here a document of L tokens gets the least power of two of ranks that
holds it, padded to P tokens that divide by 2 * ranks, and documents are packed so that the ranks'
work, P^2 / ranks each, is even.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch.distributed as dist

from mt_context_parallel.splits import pad_length

__all__ = ["DynamicItem", "DynamicPlan", "block_groups", "plan_dynamic", "ranks_for"]

T = TypeVar("T")
Group = dist.ProcessGroup | None


@dataclass(frozen=True, kw_only=True)
class DynamicItem:
    """One document on its ranks.

    Attributes:
        document: index in the list that was planned.
        length: its own tokens; the ranks share `padded_length`.
        first_rank: of the block of ranks that shares it.
        ranks: size of the block, a power of two; blocks are aligned to their size.
    """

    document: int
    length: int
    first_rank: int
    ranks: int

    @property
    def padded_length(self) -> int:
        """The tokens to pad it to, at its end, so that both splits divide."""
        return pad_length(self.length, ranks=self.ranks)

    @property
    def work(self) -> float:
        """Score entries per rank, up to a constant."""
        return self.padded_length**2 / self.ranks


@dataclass(frozen=True, kw_only=True)
class DynamicPlan:
    """Which ranks compute which document, in the order in which all of them do.

    Equal inputs give equal plans, so every rank makes its own and nothing is sent. The plan holds
    host numbers alone: running it reads nothing back from a device.

    Attributes:
        ranks: of the whole group.
        items: every document once.
    """

    ranks: int
    items: tuple[DynamicItem, ...]

    def of_rank(self, rank: int) -> tuple[DynamicItem, ...]:
        """The documents of a rank, in order; () for a rank without any."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank must be in 0..{self.ranks - 1}, got {rank}")
        return tuple(i for i in self.items if i.first_rank <= rank < i.first_rank + i.ranks)

    def loads(self) -> tuple[float, ...]:
        """Work of each rank."""
        return tuple(sum(item.work for item in self.of_rank(rank)) for rank in range(self.ranks))

    def run(
        self, groups: Mapping[int, Group], rank: int, step: Callable[[DynamicItem, Group], T]
    ) -> dict[int, T]:
        """Call `step(item, group)` for every document of a rank.

        Only the ranks of a document meet for it, and all in the plan's order, so they need no
        barrier; a rank without documents returns at once.

        Args:
            groups: The blocks this rank is in, by size; `block_groups` makes them.
            rank: This rank.
            step: Pads a document to `item.padded_length` and computes this rank's part of it,
                for example its attention.

        Returns:
            What `step` returned, by document.

        Raises:
            ValueError: A block is missing, or is not of its size; before anything is computed.
        """
        own = self.of_rank(rank)
        for size in {item.ranks for item in own}:
            group = groups.get(size)
            found = 1 if group is None else group.size()
            if found != size:
                raise ValueError(
                    f"the plan needs a group of {size} ranks, but groups[{size}] has {found}; make "
                    f"them with block_groups() over the {self.ranks} ranks"
                )
        return {item.document: step(item, groups.get(item.ranks)) for item in own}


def ranks_for(length: int, *, max_length: int) -> int:
    """The least power of two of ranks that holds a document.

    Split over several ranks, each has two equal chunks, so an even number of tokens:
    2^ceil(log2(length / max_length)) for an even `max_length`, or the even number below it.

    Raises:
        ValueError: A size below 1, or no number of ranks is enough: `max_length` is 1.
    """
    if length < 1 or max_length < 1:
        raise ValueError(f"length and max_length must be at least 1, got {length} and {max_length}")
    if length <= max_length:
        return 1
    if max_length == 1:
        raise ValueError(
            f"max_length is 1, but a document of {length} tokens that is split gives each rank at "
            "least 2; use 2 or more"
        )
    held = max_length // 2 * 2
    return 1 << (-(-length // held) - 1).bit_length()


def _check_power_of_two(ranks: int) -> None:
    if ranks < 1 or ranks & (ranks - 1):
        below = 1 << max(0, ranks.bit_length() - 1) if ranks > 0 else 1
        nearest = f"{below} or {2 * below}" if ranks > 0 else "1"
        raise ValueError(f"ranks must be a power of two, got {ranks}; the nearest is {nearest}")


def plan_dynamic(lengths: Sequence[int], *, ranks: int, max_length: int) -> DynamicPlan:
    """Give every document its block of ranks, the largest work first, to the least loaded block.

    Args:
        lengths: Tokens of each document, not padded; may be empty.
        ranks: Ranks to plan for, a power of two.
        max_length: Tokens of one document, padding included, that one rank can hold.

    Raises:
        ValueError: `ranks` is no power of two, or a document is too long for all of them.
    """
    _check_power_of_two(ranks)
    held = max_length if ranks == 1 else max_length // 2 * 2
    wanted = []
    for document, length in enumerate(lengths):
        size = ranks_for(length, max_length=max_length)
        if size > ranks:
            raise ValueError(
                f"document {document} has {length} tokens, more than {ranks} ranks of "
                f"{max_length} tokens hold; cut it to {ranks * held} or raise max_length to "
                f"{pad_length(length, ranks=ranks) // ranks}"
            )
        wanted.append(DynamicItem(document=document, length=length, first_rank=0, ranks=size))
    # Larger blocks first: they can only be placed aligned, and the small ones fill what they leave.
    wanted.sort(key=lambda item: (-item.ranks, -item.work, item.document))
    loads, items = [0.0] * ranks, []
    for item in wanted:
        starts = range(0, ranks, item.ranks)
        first = min(starts, key=lambda start, n=item.ranks: max(loads[start : start + n]))
        for rank in range(first, first + item.ranks):
            loads[rank] += item.work
        items.append(
            DynamicItem(
                document=item.document, length=item.length, first_rank=first, ranks=item.ranks
            )
        )
    return DynamicPlan(ranks=ranks, items=tuple(items))


def block_groups(group: Group) -> dict[int, Group]:
    """This rank's aligned blocks of 1, 2, 4, ... ranks of a group, by size. Collective, once.

    The blocks below the whole are plain groups with torch's default options, also where `group`
    has others or is a checked one of a `ParallelState`. With a state, the same blocks with its
    checks and options are `{n: state.block_group("dp-cp", n) for n in (1, 2, 4, ...)}`.

    Raises:
        ValueError: The size of `group` is no power of two.
    """
    blocks: dict[int, Group] = {1: None}
    if group is None or group.size() == 1:
        return blocks
    _check_power_of_two(group.size())
    members, rank, size = dist.get_process_group_ranks(group), group.rank(), 2
    while size < group.size():
        start = rank // size * size
        part = members[start : start + size]
        blocks[size] = cast(Group, dist.new_group(part, use_local_synchronization=True))
        size *= 2
    blocks[group.size()] = group
    return blocks
