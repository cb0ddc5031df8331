"""A bridge between two modules that live on different ranks in different layouts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from mt_files import check_type, experimental
from mt_parallel_state import ParallelLayout
from torch import Tensor

from mt_pipeline.transfer import TensorSpec, meet

Box: TypeAlias = tuple[range, ...]
"""The part of a tensor that a rank holds: a range of indices for each of the first dims. The
remaining dims are whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """The transfer of one box from one rank to another, or to the same rank.

    Attributes:
        source: Rank that holds the box.
        destination: Rank that receives the box; may be the source itself.
        box: Indices in the whole tensor.
    """

    source: int
    destination: int
    box: Box


def batch_boxes(rows: int, copies: Sequence[Sequence[int]]) -> dict[int, Box]:
    """Divide the rows of a batch among ranks.

    Args:
        rows: Number of rows of the whole batch.
        copies: For each part of the batch, the ranks that hold a copy of it. Parts differ by at
            most one row; the larger parts come first.

    Returns:
        The box of each rank, a range of dim 0.

    Raises:
        ValueError: A rank occurs twice, there are no parts, or `rows` is negative.

    Example:
        >>> batch_boxes(8, [[0, 1], [2, 3]])  # two ranks of tensor parallelism, twice
        {0: (range(0, 4),), 1: (range(0, 4),), 2: (range(4, 8),), 3: (range(4, 8),)}
    """
    if not copies:
        raise ValueError("copies is empty: list the ranks that hold each part of the batch")
    if not isinstance(rows, int) or rows < 0:
        raise ValueError(f"rows is {rows!r:.60}: expected a whole number of 0 or more")
    each, more = divmod(rows, len(copies))
    boxes: dict[int, Box] = {}
    start = 0
    for part, ranks in enumerate(copies):
        stop = start + each + (part < more)
        for rank in ranks:
            if rank in boxes:
                raise ValueError(f"rank {rank} is in two places of {copies}: a rank has one part")
            boxes[rank] = (range(start, stop),)
        start = stop
    return boxes


def layout_boxes(
    rows: int, layout: ParallelLayout, *, stage: int = 0, first_rank: int = 0
) -> dict[int, Box]:
    """Divide the rows of a batch over the data-parallel axis of a layout.

    Args:
        rows: Number of rows of the whole batch.
        layout: Layout of one of the two modules. Ranks that differ in other axes hold copies.
        stage: Pipeline stage that touches the bridge: the last stage of an encoder, the first
            stage of a decoder.
        first_rank: Rank of the bridge's group at which the module's ranks begin.

    Raises:
        ValueError: The layout has no such stage, or `first_rank` or `rows` is negative.
        TypeError: `layout` is not a `ParallelLayout`.
    """
    check_type("layout", layout, ParallelLayout)
    if stage not in range(layout.size("pp")):
        raise ValueError(
            f"stage is {stage!r:.60}: the layout has stages 0..{layout.size('pp') - 1}"
        )
    if not isinstance(first_rank, int) or first_rank < 0:
        raise ValueError(f"first_rank is {first_rank!r:.60}: expected a whole number of 0 or more")
    copies: list[list[int]] = [[] for _ in range(layout.size("dp"))]
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        if at["pp"] == stage:
            copies[at["dp"]].append(first_rank + rank)
    return batch_boxes(rows, copies)


def plan_moves(source: Mapping[int, Box], destination: Mapping[int, Box]) -> tuple[Move, ...]:
    """Plan the transfers that give every destination rank its box, each index from one rank.

    If several source ranks hold the same box (copies), a destination among them keeps its own;
    otherwise destinations take turns, so that all sources send about the same amount.

    Args:
        source: The box that each rank holds. Boxes are equal or disjoint.
        destination: The box that each rank needs.

    Returns:
        The moves, in the order in which all ranks make them.

    Raises:
        ValueError: There is no source box, two source boxes overlap in part, no rank holds a
            needed index, or boxes differ in their number of dims.

    Example:
        >>> one, other = batch_boxes(4, [[0], [1]]), batch_boxes(4, [[2], [3], [4], [5]])
        >>> for move in plan_moves(one, other):
        ...     print(move.source, "->", move.destination, move.box)
        0 -> 2 (range(0, 1),)
        0 -> 3 (range(1, 2),)
        1 -> 4 (range(2, 3),)
        1 -> 5 (range(3, 4),)
    """
    check_type("source", source, Mapping)
    check_type("destination", destination, Mapping)
    if not source:
        raise ValueError("there is no source box: give the box of each rank on the first side")
    copies: dict[Box, list[int]] = {}
    for rank, box in sorted(source.items()):
        copies.setdefault(box, []).append(rank)
    if len({len(box) for box in [*source.values(), *destination.values()]}) > 1:
        raise ValueError("boxes differ in their number of dims: give one range for the same dims")
    for one, other in itertools.combinations(copies, 2):
        if _volume(_common(one, other)):
            raise ValueError(
                f"ranks {copies[one]} hold {_shown(one)} and ranks {copies[other]} hold "
                f"{_shown(other)}, which overlap: source boxes are equal or disjoint"
            )
    turns = dict.fromkeys(copies, 0)
    moves: list[Move] = []
    for rank, needed in sorted(destination.items()):
        found = 0
        for box, holders in copies.items():
            common = _common(box, needed)
            if not _volume(common):
                continue
            holder = rank
            if rank not in holders:
                holder = holders[turns[box] % len(holders)]
                turns[box] += 1
            moves.append(Move(source=holder, destination=rank, box=common))
            found += _volume(common)
        if found != _volume(needed):
            raise ValueError(
                f"rank {rank} needs {_shown(needed)}, but the source ranks hold {found} of its "
                f"{_volume(needed)} indices: both sides must cut the same whole"
            )
    # A backend opens the connection of two ranks at its first use and blocks until both are there.
    # With one order for all ranks, no circle of waiting can arise.
    return tuple(sorted(moves, key=lambda m: (sorted((m.source, m.destination)), m.source)))


@experimental(since="0.1", remove_in="0.3")
class Bridge:
    """Move activations from one parallel layout to another, and their gradients back.

    The bridge joins an encoder on some ranks and a decoder on other ranks, each with its own
    parallelism: it fans the batch out (or in) between them. Ranks with the same box hold the same
    values, both of the activation and of its gradient (as tensor parallelism does around its
    layers), so each source rank gets the whole gradient of its box from one destination rank. A
    rank may be on both sides, and a box may also cut further dims, such as the sequence.

    Every rank of the group builds the bridge at the same point. One all-reduce connects them,
    because a backend that connects at the first transfer may need all ranks of the group there.
    After that every rank of the two sides makes the same calls in the same order; other ranks make
    none.

    Args:
        source: The box of each rank of the first side.
        destination: The box of each rank of the second side.
        group: A group that contains both sides; ranks are numbered within it. None means that this
            rank is both sides.
        device: Device of the tensors.

    Raises:
        ValueError: The plan is impossible (see `plan_moves`), or a rank is not in the group.
        TransferError: Another rank of the group did not take part.
    """

    def __init__(
        self,
        source: Mapping[int, Box],
        destination: Mapping[int, Box],
        *,
        group: dist.ProcessGroup | None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.moves = plan_moves(source, destination)
        self.moves_back = plan_moves(destination, source)
        self._source, self._destination = dict(source), dict(destination)
        self._cut_dims = len(next(iter(source.values())))
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)
        self._device = torch.device(device)
        size = 1 if group is None else dist.get_world_size(group)
        outside = [rank for rank in (*source, *destination) if rank not in range(size)]
        if outside:
            raise ValueError(
                f"rank {outside[0]} has a box, but the group has ranks 0..{size - 1}: pass a group "
                "with all ranks of both sides"
            )
        if group is not None:
            meet(group, self._device)

    def forward(self, x: Tensor | None, spec: TensorSpec) -> Tensor | None:
        """Move an activation from the first side to the second.

        Args:
            x: This rank's box of the activation; None on ranks outside the first side.
            spec: Shape and dtype of the whole activation.

        Returns:
            This rank's box on the second side: a leaf tensor, which requires a gradient if its
            dtype can have one. None on ranks outside that side.
        """
        y = self.start(x, spec)()
        return y.requires_grad_() if y is not None and spec.has_gradient else y

    def backward(self, grad: Tensor | None, spec: TensorSpec) -> Tensor | None:
        """Move the gradient of an activation back to the first side.

        Args:
            grad: Gradient of the tensor that `forward` returned; None on ranks without one.
            spec: Shape and dtype of the whole activation.

        Returns:
            The gradient of this rank's box on the first side; None on ranks outside that side.
        """
        return self.start(grad, spec, back=True)()

    def start(
        self, tensor: Tensor | None, spec: TensorSpec, *, back: bool = False
    ) -> Callable[[], Tensor | None]:
        """Start a `forward`, or with `back` a `backward`, without waiting for it.

        Returns:
            A function that waits until everything is sent and received, and returns this rank's
            box; None on a rank that receives nothing.

        Raises:
            ValueError: A tensor is missing or does not fit this rank's box.
        """
        held, needed = self._source, self._destination
        if back:
            held, needed = needed, held
        mine, wanted = held.get(self._rank), needed.get(self._rank)
        rest = spec.shape[self._cut_dims :]
        if mine is not None:
            _require_part(tensor, TensorSpec((*map(len, mine), *rest), spec.dtype), self._rank)
        result = None if wanted is None else self._empty(wanted, spec.dtype, rest)
        arriving: list[tuple[Box, Tensor]] = []
        transfers: list[dist.P2POp] = []
        for move in self.moves_back if back else self.moves:
            if self._rank == move.source:
                part = _part(tensor, mine, move.box).detach().contiguous()
                if move.destination == self._rank:
                    arriving.append((move.box, part))
                else:
                    transfers.append(self._transfer(dist.isend, part, move.destination))
            elif self._rank == move.destination:
                part = self._empty(move.box, spec.dtype, rest)
                arriving.append((move.box, part))
                transfers.append(self._transfer(dist.irecv, part, move.source))
        works = dist.batch_isend_irecv(transfers) if transfers else []

        def wait() -> Tensor | None:
            for work in works:
                work.wait()
            for box, part in arriving:
                _part(result, wanted, box).copy_(part)
            for done in (works, arriving, transfers):  # tensors must live until they are sent
                done.clear()
            return result

        return wait

    def _empty(self, box: Box, dtype: torch.dtype, rest: tuple[int, ...]) -> Tensor:
        return torch.empty((*map(len, box), *rest), dtype=dtype, device=self._device)

    def _transfer(self, op: Any, part: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(op, part, group=self._group, group_peer=peer)


def _common(one: Box, other: Box) -> Box:
    return tuple(
        range(max(a.start, b.start), max(a.start, b.start, min(a.stop, b.stop)))
        for a, b in zip(one, other, strict=True)
    )


def _volume(box: Box) -> int:
    return prod(map(len, box))


def _part(tensor: Tensor | None, whole: Box | None, box: Box) -> Tensor:
    assert tensor is not None and whole is not None, "only ranks with a part get here"  # noqa: S101, PT018
    for dim, (outer, inner) in enumerate(zip(whole, box, strict=True)):
        tensor = tensor.narrow(dim, inner.start - outer.start, len(inner))
    return tensor


def _require_part(tensor: Tensor | None, spec: TensorSpec, rank: int) -> None:
    got = None if tensor is None else TensorSpec(tuple(tensor.shape), tensor.dtype)
    if got != spec:
        raise ValueError(f"rank {rank} gave {got} to the bridge, but its box is {spec}")


def _shown(box: Box) -> str:
    return " x ".join(f"{r.start}..{r.stop}" for r in box)
