"""The plan of a save: the arrays of all ranks with their chunk grids."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from mt_ckpt.array import ArraySpec
from mt_ckpt.dtype import dtype_name, stored_dtype
from mt_ckpt.error import CheckpointError
from mt_ckpt.grid import Box, plan_chunks
from mt_ckpt.manifest import check_nesting
from mt_ckpt.shard import TensorShard
from mt_ckpt.stored.packing import Pack, plan_packs


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
        }
        for shard in shards
    ]


def plan_arrays(reports: list[list[dict[str, Any]]]) -> tuple[dict[str, ArraySpec], list[Pack]]:
    """Return the arrays of all ranks and their packs, and check that the boxes tile each array.

    Args:
        reports: The `describe_shards` of each rank.

    Raises:
        CheckpointError: The ranks disagree about an array, or their boxes don't cover it.
        ValueError: A name is both an array and a group.
    """
    kinds: dict[str, tuple[tuple[int, ...], str]] = {}
    boxes: dict[str, list[Box]] = {}
    for rank, report in enumerate(reports):
        for item in report:
            name, kind = item["name"], (tuple(item["global_shape"]), item["dtype"])
            if kinds.setdefault(name, kind) != kind:
                raise CheckpointError(
                    f"tensor {name!r}: rank {rank} says shape {kind[0]} and dtype {kind[1]}, "
                    f"another says {kinds[name][0]} and {kinds[name][1]}",
                    tensor=name,
                )
            boxes.setdefault(name, [])
            if item["write"]:
                place = {key: tuple(item[key]) for key in ("offsets", "shape")}
                boxes[name].append(Box(rank=rank, **place))
    check_nesting(list(kinds))
    items = {name: stored_dtype(dtype).itemsize for name, (_, dtype) in kinds.items()}
    packs = plan_packs({n: math.prod(shape) * items[n] for n, (shape, _) in kinds.items()}, boxes)
    of = {name: pack.file for pack in packs for name in pack.boxes}
    arrays = {}
    for name, (shape, dtype) in sorted(kinds.items()):
        chunks = plan_chunks(name, shape, items[name], boxes[name])  # checks the boxes as well
        pack = of.get(name)
        arrays[name] = ArraySpec(
            shape=shape, dtype=dtype, chunks=shape if pack else chunks, pack=pack
        )
    return arrays, packs
