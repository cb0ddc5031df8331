"""The chunks of a rank's packs, whose boxes may come from other ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mt_ckpt.array import ArraySpec
from mt_ckpt.digest import CRC_BYTES, crc32c
from mt_ckpt.dtype import stored_dtype, to_stored
from mt_ckpt.grid import Box
from mt_ckpt.ranks import Ranks
from mt_ckpt.shard import TensorShard
from mt_ckpt.stored.packing import Pack, pack_bytes

Kind = tuple[tuple[int, ...], str]


def packs_to_json(packs: Sequence[Pack], arrays: Mapping[str, ArraySpec]) -> list[dict[str, Any]]:
    """Return packs as JSON, with shape and dtype of their arrays, for all ranks."""
    return [
        {
            "file": pack.file,
            "rank": pack.rank,
            "arrays": [
                [
                    name,
                    list(arrays[name].shape),
                    arrays[name].dtype,
                    [[box.rank, list(box.offsets), list(box.shape)] for box in boxes],
                ]
                for name, boxes in pack.boxes.items()
            ],
        }
        for pack in packs
    ]


def packs_from_json(items: list[dict[str, Any]]) -> tuple[list[Pack], dict[str, Kind]]:
    """Return packs, and shape and dtype of their arrays, the same on every rank."""
    packs, arrays = [], dict[str, Kind]()
    for item in items:
        boxes: dict[str, list[Box]] = {}
        for name, shape, dtype, places in item["arrays"]:
            arrays[name] = tuple(shape), dtype
            boxes[name] = [
                Box(rank=rank, offsets=tuple(offsets), shape=tuple(shape))
                for rank, offsets, shape in places
            ]
        packs.append(Pack(file=item["file"], rank=item["rank"], boxes=boxes))
    return packs, arrays


class Gathering:
    """The values of packed arrays on one rank.

    Every decision follows from the plan, which is the same on all ranks: what a rank sends, in
    which order, and how much it receives.

    Args:
        packs: All packs of the save.
        arrays: Shape and dtype of their arrays.
        shards: This rank's boxes; the plan decides the ones that it sends.
        rank: This rank.
    """

    def __init__(
        self,
        packs: Sequence[Pack],
        arrays: Mapping[str, Kind],
        shards: Sequence[TensorShard],
        rank: int,
    ) -> None:
        self._packs, self._arrays, self._rank = packs, arrays, rank
        self._held = {(s.name, s.offsets): s.tensor for s in shards if s.name in arrays}
        self._parts: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}

    @property
    def own(self) -> list[Pack]:
        """The packs that this rank writes."""
        return [pack for pack in self._packs if pack.rank == self._rank]

    @property
    def moves(self) -> bool:
        """Whether any box goes from one rank to another."""
        return any(pack.rank != box.rank for pack, _, box in self._boxes())

    def exchange(self, ranks: Ranks) -> None:
        """Send and receive boxes; every rank of the save calls it.

        A rank that fails to read its tensors still sends, so that none waits for it.
        """
        error: Exception | None = None
        outgoing: dict[int, list[np.ndarray]] = {}
        incoming: dict[int, int] = {}
        for pack, name, box in self._boxes():
            size = self._size(name, box)
            if box.rank == self._rank != pack.rank:
                try:
                    data = self._bytes(name, box)
                except Exception as caught:  # noqa: BLE001 - it is raised after the exchange
                    error, data = caught, np.zeros(size, np.uint8)
                outgoing.setdefault(pack.rank, []).append(data)
            elif pack.rank == self._rank != box.rank:
                incoming[box.rank] = incoming.get(box.rank, 0) + size
        received = ranks.exchange(
            {rank: np.concatenate(parts) for rank, parts in outgoing.items()}, incoming
        )
        if error is not None:
            raise error
        done = dict.fromkeys(incoming, 0)
        for pack, name, box in self._boxes():
            if pack.rank == self._rank != box.rank:
                start, end = done[box.rank], done[box.rank] + self._size(name, box)
                self._parts[name, box.offsets] = received[box.rank][start:end]
                done[box.rank] = end

    def content(self, pack: Pack, *, step: int) -> tuple[bytes, dict[str, int]]:
        """Return the content of a pack of this rank, and the offset of each array's chunk."""
        arrays, chunks = dict[str, ArraySpec](), dict[str, np.ndarray]()
        for name, boxes in pack.boxes.items():
            shape, dtype = self._arrays[name]
            arrays[name] = ArraySpec(shape=shape, dtype=dtype, chunks=shape, pack=pack.file)
            chunks[name] = self._chunk(name, arrays[name], boxes)
        return pack_bytes(arrays, chunks, step=step)

    def _chunk(self, name: str, spec: ArraySpec, boxes: list[Box]) -> np.ndarray:
        content = np.empty(spec.chunk_bytes, np.uint8)
        data = content[:-CRC_BYTES]
        values = data.view(spec.stored).reshape(spec.shape)
        for box in boxes:
            is_own = box.rank == self._rank
            part = self._bytes(name, box) if is_own else self._parts[name, box.offsets]
            place = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.shape, strict=True))
            values[(*place, ...)] = part.view(spec.stored).reshape(box.shape)
        content[-CRC_BYTES:] = crc32c(data)
        return content

    def _bytes(self, name: str, box: Box) -> np.ndarray:
        values = to_stored(self._held[name, box.offsets])
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    def _size(self, name: str, box: Box) -> int:
        return math.prod(box.shape) * stored_dtype(self._arrays[name][1]).itemsize

    def _boxes(self) -> Iterator[tuple[Pack, str, Box]]:
        for pack in self._packs:
            for name, boxes in pack.boxes.items():
                for box in boxes:
                    yield pack, name, box
