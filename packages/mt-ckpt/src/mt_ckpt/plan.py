"""The plan of a save: the arrays of all ranks with their chunk grids, and the writers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mt_ckpt.array import ArraySpec
from mt_ckpt.dtype import dtype_name, stored_dtype
from mt_ckpt.error import CheckpointError
from mt_ckpt.grid import Box, chunk_indices, chunk_number, overlap, plan_chunks
from mt_ckpt.manifest import check_nesting
from mt_ckpt.shard import TensorShard
from mt_ckpt.stored.packing import Pack, plan_packs, small_arrays

Kind = tuple[tuple[int, ...], str]
Place = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The arrays of a save, and their writers.

    Attributes:
        arrays: All arrays, by name.
        packs: The packs, each with the rank that writes it.
        writers: The rank that writes each chunk, in the order of `chunk_number`, for arrays with
            replicated boxes. In other arrays, each box's own rank writes its chunks.
    """

    arrays: dict[str, ArraySpec]
    packs: list[Pack]
    writers: dict[str, list[int]]


@dataclass
class _Reported:
    """An array as the ranks report it, with its boxes, and the ranks that hold each box."""

    kind: Kind
    boxes: list[Box] = field(default_factory=list)
    replicas: dict[Place, list[int]] = field(default_factory=dict)

    @property
    def itemsize(self) -> int:
        return stored_dtype(self.kind[1]).itemsize

    @property
    def size(self) -> int:
        return math.prod(self.kind[0]) * self.itemsize

    def holders(self, box: Box) -> list[int]:
        """Return the ranks that can write a box."""
        return sorted({box.rank, *self.replicas.get((box.offsets, box.shape), ())})


def describe_shards(shards: Iterable[TensorShard]) -> list[dict[str, Any]]:
    """Return a JSON description of each shard, without its values, for the rank that plans."""
    return [
        {
            "name": shard.name,
            "dtype": dtype_name(shard.tensor.dtype),
            "global_shape": list(shard.global_shape),
            "offsets": list(shard.offsets),
            "shape": list(shard.tensor.shape),
            "write": shard.write,
            "replica": shard.replica,
        }
        for shard in shards
    ]


def plan_arrays(reports: list[list[dict[str, Any]]]) -> Plan:
    """Plan a save, and check that the boxes tile each array.

    Objects that several ranks can write, because they have replicas or because the boxes of a
    packed array come from several ranks, are shared out by bytes. All other objects count as loads
    of their ranks.

    Args:
        reports: The `describe_shards` of each rank.

    Raises:
        CheckpointError: The ranks disagree about an array, or their boxes don't cover it.
        ValueError: A name is both an array and a group.
    """
    found = dict(sorted(_collected(reports).items()))
    check_nesting(list(found))
    small = small_arrays({name: item.size for name, item in found.items()})
    arrays = {}
    for name, item in found.items():
        (shape, dtype), boxes = item.kind, item.boxes
        # This checks the boxes as well.
        chunks, slices = plan_chunks(name, shape, item.itemsize, boxes)
        arrays[name] = ArraySpec(
            shape=shape, dtype=dtype, chunks=shape if name in small else chunks, slices=slices
        )
    objects = list(_objects(found, arrays, small))
    ranks = share_out([(size, holders) for *_, size, holders in objects])
    owners: dict[str, int] = {}
    writers: dict[str, list[int]] = {}
    for (name, number, _, _), rank in zip(objects, ranks, strict=True):
        if name in small:
            owners[name] = rank
        elif number is not None:
            writers.setdefault(name, [0] * arrays[name].num_chunks)[number] = rank
    given = {
        name: [
            replace(box, rank=owners[name]) if owners[name] in found[name].holders(box) else box
            for box in found[name].boxes
        ]
        for name in small
    }
    packs = plan_packs(small, owners, given)
    for pack in packs:
        arrays |= {name: replace(arrays[name], pack=pack.file) for name in pack.boxes}
    return Plan(arrays=arrays, packs=packs, writers=writers)


def _collected(reports: list[list[dict[str, Any]]]) -> dict[str, _Reported]:
    found: dict[str, _Reported] = {}
    for rank, report in enumerate(reports):
        for item in report:
            name, kind = item["name"], (tuple(item["global_shape"]), item["dtype"])
            known = found.setdefault(name, _Reported(kind))
            if known.kind != kind:
                raise CheckpointError(
                    f"tensor {name!r}: rank {rank} says shape {kind[0]} and dtype {kind[1]}, "
                    f"another says {known.kind[0]} and {known.kind[1]}",
                    tensor=name,
                )
            offsets, shape = tuple(item["offsets"]), tuple(item["shape"])
            if item["write"]:
                known.boxes.append(Box(rank=rank, offsets=offsets, shape=shape))
            elif item["replica"]:
                known.replicas.setdefault((offsets, shape), []).append(rank)
    return found


def _objects(
    found: Mapping[str, _Reported], arrays: Mapping[str, ArraySpec], small: Mapping[str, int]
) -> Iterator[tuple[str, int | None, int, list[int]]]:
    """Yield name, chunk number, bytes and possible writers of each object to write.

    Only chunks in arrays with replicas have numbers; a packed array is one object, and so is any
    other box.
    """
    for name, item in found.items():
        holders = [item.holders(box) for box in item.boxes]
        if name in small:
            full = [r for r, box in zip(holders, item.boxes, strict=True) if 0 not in box.shape]
            yield name, None, item.size, sorted({rank for ranks in full for rank in ranks})
            continue
        spec, is_shared = arrays[name], max(map(len, holders), default=0) > 1
        for box, ranks in zip(item.boxes, holders, strict=True):
            if not is_shared:
                yield name, None, math.prod(box.shape) * item.itemsize, ranks
                continue
            for index in chunk_indices(box, spec.chunks):
                number = chunk_number(index, spec.shape, spec.chunks)
                yield name, number, spec.chunk_bytes, ranks


def share_out(objects: Sequence[tuple[int, list[int]]]) -> list[int]:
    """Return the rank that writes each object: the largest first, to its least loaded holder.

    Args:
        objects: Bytes of each object, and the ranks that hold it; objects with one rank come first.
    """
    loads: dict[int, int] = {}
    ranks = [0] * len(objects)
    order = sorted(enumerate(objects), key=lambda item: (len(item[1][1]) > 1, -item[1][0]))
    for number, (size, holders) in order:
        rank = min(holders, key=lambda rank: (loads.get(rank, 0), rank))
        loads[rank] = loads.get(rank, 0) + size
        ranks[number] = rank
    return ranks


def own_shards(
    shards: Iterable[TensorShard],
    rank: int,
    *,
    chunks: Mapping[str, Sequence[int]],
    writers: Mapping[str, Sequence[int]],
    packs: Sequence[Pack],
) -> list[TensorShard]:
    """Return the boxes that a rank writes or sends, as views of its shards.

    Args:
        shards: The rank's boxes.
        rank: The rank.
        chunks: Shape of a chunk of each array outside the packs.
        writers: See `Plan`.
        packs: See `Plan`.
    """
    given = {
        (name, box.offsets, box.shape)
        for pack in packs
        for name, boxes in pack.boxes.items()
        for box in boxes
        if box.rank == rank
    }
    done: set[tuple[Any, ...]] = set()  # a process that acts for several ranks has equal boxes
    found: list[TensorShard] = []
    for shard in shards:
        box = Box(offsets=shard.offsets, shape=tuple(shard.tensor.shape))
        if shard.name in writers and (shard.write or shard.replica):
            step = tuple(chunks[shard.name])
            for index in chunk_indices(box, step):
                number = chunk_number(index, shard.global_shape, step)
                if writers[shard.name][number] == rank and (shard.name, number) not in done:
                    done.add((shard.name, number))
                    found.append(_part(shard, box, index, step))
        elif shard.name in chunks:
            found += [shard] if shard.write and shard.name not in writers else []
        elif (key := (shard.name, box.offsets, box.shape)) in given:
            given.discard(key)
            found.append(shard)
    return found


def _part(
    shard: TensorShard, box: Box, index: tuple[int, ...], step: tuple[int, ...]
) -> TensorShard:
    """Return the part of a box inside a chunk."""
    in_box, _ = overlap(box, index, step)
    offsets = (o + part.start for o, part in zip(box.offsets, in_box, strict=False))
    return replace(shard, tensor=shard.tensor[in_box], offsets=tuple(offsets))
