"""The split of a sequence over ranks: which tokens each rank holds, `shard` and `unshard`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import index
from typing import Literal, NamedTuple, get_args

import torch
from mt_parallel_state import Group, all_gather, group_rank, group_size
from torch import Tensor

Split = Literal["zigzag", "contiguous"]
_LONGEST = 1 << 32


class Segment(NamedTuple):
    """A run of neighbouring tokens that one rank holds.

    Attributes:
        start: Index of the first token in the whole sequence.
        length: Number of tokens in the run.
        local: Index of the first token in the rank's shard.
        document: Index of the packed document; 0 in a sequence that is not packed.
    """

    start: int
    length: int
    local: int
    document: int


def parts_of(split: Split, ranks: int) -> int:
    """Return the number of equal pieces that each document is cut into."""
    if not isinstance(ranks, int):
        raise TypeError(f"ranks must be an int, got {ranks!r}")
    if split not in get_args(Split):
        raise ValueError(f"split must be one of {get_args(Split)}, got {split!r:.80}")
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    return ranks if split == "contiguous" or ranks == 1 else 2 * ranks


def _check_length(length: int) -> None:
    if not isinstance(length, int):
        raise TypeError(f"the length of a sequence must be an int, got {length!r}")
    if length > _LONGEST:
        raise ValueError(f"a sequence has at most {_LONGEST:,} tokens, got {length:,}")


def pad_length(length: int, *, ranks: int, split: Split = "zigzag") -> int:
    """Return the smallest length from `length` on that can be split over `ranks`."""
    _check_length(length)
    parts = parts_of(split, ranks)
    return max(1, -(-length // parts)) * parts


def document_bounds(length: int, cu_seqlens: Sequence[int] | Tensor | None) -> list[int]:
    """Return the checked starts of the documents and the end of the last: [0, ..., length].

    A CUDA tensor is read back, which waits for the device; a list or a CPU tensor is not.

    Raises:
        TypeError: The bounds are not integers.
        ValueError: The bounds do not rise from 0 to `length`, or the sequence is empty.
    """
    _check_length(length)
    if length < 1:
        raise ValueError(f"the sequence has {length} tokens; at least 1 is needed")
    if cu_seqlens is None:
        return [0, length]
    values = cu_seqlens
    if isinstance(values, Tensor):
        if values.dim() != 1:
            raise ValueError(f"cu_seqlens must be [documents + 1], got shape {tuple(values.shape)}")
        values = values.tolist()
    try:
        bounds = [index(n) for n in values]
    except TypeError:
        raise TypeError(f"cu_seqlens must be a sequence of integers, got {values!r}") from None
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != length:
        ends = (bounds[0], bounds[-1]) if bounds else ()
        raise ValueError(
            f"cu_seqlens must go from 0 to the sequence length {length}, got {len(bounds)} bounds "
            f"with ends {ends}"
        )
    for number, (start, end) in enumerate(pairwise(bounds)):
        if end <= start:
            raise ValueError(
                f"cu_seqlens must rise, but document {number} goes from {start} to {end}; leave "
                "empty documents out"
            )
    return bounds


def segments(
    length: int,
    *,
    ranks: int,
    rank: int,
    split: Split = "zigzag",
    cu_seqlens: Sequence[int] | Tensor | None = None,
) -> list[Segment]:
    """Return the runs of tokens that `rank` holds, in the order of its shard.

    `"zigzag"` cuts the sequence into 2 * ranks chunks and gives rank i the chunks i and
    2 * ranks - 1 - i, so that every rank has the same causal work; `"contiguous"` gives rank i the
    i-th of `ranks` chunks. Each document of a packed sequence is split in this way on its own.

    Args:
        length: Tokens in the whole sequence, all documents together.
        ranks: Ranks that share the sequence.
        rank: The rank that holds the runs.
        split: How a document is cut.
        cu_seqlens: Starts of the packed documents and the end of the last; None for one document.

    Raises:
        TypeError: `cu_seqlens` are not integers.
        ValueError: A document's length does not divide; the message has the nearest that do.
    """
    parts = parts_of(split, ranks)
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be in 0..{ranks - 1}, got {rank}")
    bounds = document_bounds(length, cu_seqlens)
    own = (rank,) if parts == ranks else (rank, parts - 1 - rank)
    found: list[Segment] = []
    local = 0
    for document, (start, end) in enumerate(pairwise(bounds)):
        size = end - start
        if size % parts:
            what = "the sequence" if len(bounds) == 2 else f"document {document}"
            below = size // parts * parts
            nearest = " or ".join(str(n) for n in (below, below + parts) if n)
            raise ValueError(
                f"{what} has {size} tokens, which split={split!r} over {ranks} ranks cuts in "
                f"{parts} equal parts; the nearest lengths that work are {nearest}; pad to "
                f"pad_length({size}, ranks={ranks}, split={split!r})"
            )
        chunk = size // parts
        for part in own:
            found.append(Segment(start + part * chunk, chunk, local, document))
            local += chunk
    return found


def all_segments(length: int, ranks: int, split: Split, bounds: list[int]) -> list[list[Segment]]:
    """Return the runs of every rank, with bounds from `document_bounds`."""
    return [
        segments(length, ranks=ranks, rank=rank, split=split, cu_seqlens=bounds)
        for rank in range(ranks)
    ]


def sorted_runs(runs: Sequence[Sequence[Segment]]) -> list[Segment]:
    """Return all ranks' runs in the order of the sequence, with their places in that order."""
    ordered = sorted((run for part in runs for run in part), key=lambda run: run.start)
    local, result = 0, []
    for run in ordered:
        result.append(run._replace(local=local))
        local += run.length
    return result


def order_of(runs: Sequence[Sequence[Segment]], device: torch.device) -> Tensor:
    """Return the index in the ranks' concatenated shards of each token of `sorted_runs`."""
    index = [torch.arange(run.start, run.start + run.length) for part in runs for run in part]
    return on_device(torch.cat(index).argsort(), device)


def on_device(index: Tensor, device: torch.device | str) -> Tensor:
    """Return a copy of a CPU tensor, by one transfer for which the host does not wait."""
    index = index.pin_memory() if torch.device(device).type == "cuda" else index
    return index.to(device, non_blocking=True)


def positions(
    length: int,
    *,
    ranks: int,
    rank: int,
    split: Split = "zigzag",
    cu_seqlens: Sequence[int] | Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the position of every token of a shard in its document, for rotary embeddings.

    Shape:
        Returns [length / ranks] of int64.

    Raises:
        TypeError: `cu_seqlens` are not integers.
        ValueError: The sequence, or a document of it, does not divide.
    """
    bounds = document_bounds(length, cu_seqlens)
    runs = segments(length, ranks=ranks, rank=rank, split=split, cu_seqlens=bounds)
    starts = [s.start - bounds[s.document] for s in runs]
    parts = [torch.arange(n, n + s.length) for n, s in zip(starts, runs, strict=True)]
    return on_device(torch.cat(parts), device)


def shard(
    x: Tensor,
    group: Group,
    *,
    dim: int = 1,
    split: Split = "zigzag",
    cu_seqlens: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """Return this rank's tokens of `x`, which every rank holds whole.

    Shape:
        x: [..., S, ...] at `dim`. Returns [..., S / ranks, ...]; `x` itself for one rank.

    Raises:
        TypeError: `cu_seqlens` are not integers.
        ValueError: The sequence, or a document of it, does not divide.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    ranks, rank = group_size(group), group_rank(group)
    runs = segments(x.shape[dim], ranks=ranks, rank=rank, split=split, cu_seqlens=cu_seqlens)
    if ranks == 1:
        return x
    return torch.cat([x.narrow(dim, s.start, s.length) for s in runs], dim=dim)


def unshard(
    x: Tensor,
    group: Group,
    *,
    dim: int = 1,
    split: Split = "zigzag",
    cu_seqlens: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """Return the whole tensor of which every rank has a shard.

    Forward is an all-gather over the group, backward a reduce-scatter that sums the ranks'
    gradients. This is right if the ranks use the whole tensor for different work. If all ranks
    compute the same loss from it, divide that loss by the group's size.

    Shape:
        x: [..., S / ranks, ...] at `dim`. Returns [..., S, ...]; `x` itself for one rank.

    Raises:
        TypeError: `cu_seqlens` are not integers.
        ValueError: The whole sequence, or a document of it, does not divide.
    """
    ranks = group_size(group)
    length = x.shape[dim] * ranks
    runs = all_segments(length, ranks, split, document_bounds(length, cu_seqlens))
    if ranks == 1:
        return x
    return all_gather(x, group, dim=dim).index_select(dim, order_of(runs, x.device))
