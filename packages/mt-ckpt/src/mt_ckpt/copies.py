"""Copies of the state in the memory of nodes, for a restart after a loss of ranks."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mt_files import MissingFileError

from mt_ckpt.disk import create_file, disk_errors, make_folders, sync
from mt_ckpt.dtype import dtype_name, from_stored, stored_dtype, to_stored
from mt_ckpt.error import CheckpointError
from mt_ckpt.load import inspect_checkpoint, load_checkpoint
from mt_ckpt.manifest import step_of
from mt_ckpt.path import as_path, disk_of
from mt_ckpt.ranks import Ranks
from mt_ckpt.root import committed_steps, latest_checkpoint
from mt_ckpt.save import save_checkpoint
from mt_ckpt.shard import TensorShard

# In the folder of checkpoints, since copies are useless after the folder is deleted.
_ID = ".copies"


class MemoryCopies:
    """Copies of the newest state of a run, in the memory of the nodes that train it.

    Each rank keeps its part of a checkpoint as a piece in the memory of its node, and another rank
    keeps a copy of the piece on the next node. The shared disk gets nothing: the step waits while
    two pieces are written to memory and one is sent. When a launcher starts all ranks again after
    the loss of a node, the memory of the other nodes is unchanged, and `restore` makes a checkpoint
    of the pieces there, which any layout loads. With all ranks on one node, the copies outlive the
    ranks but not the node.

    Every rank makes the object, calls `restore` before it looks for a checkpoint, then `save`, and
    `clear` at the end.

    Args:
        folder: Folder in the memory of this rank's node, such as `/dev/shm`. It holds twice the
            bytes that the ranks of a node write to a checkpoint, and during a copy four times. Each
            rank also has the received piece in its own memory meanwhile.
        root: Folder of the run's checkpoints; see `save_checkpoint`.
        group: The ranks that save; needs a CPU backend (gloo). None: this process saves alone.
        on_event: Called with the points reached by `save`: `copy.begin`, `copy.piece` (after each
            piece that this rank keeps), `copy.whole` (all ranks have theirs).

    Raises:
        CheckpointError: The folder can't be made, or is another user's.
    """

    def __init__(
        self,
        folder: str | Path,
        root: str | Path,
        *,
        group: dist.ProcessGroup | None = None,
        on_event: Callable[[str], None] | None = None,
    ) -> None:
        self._root, self._ranks = as_path(root), Ranks(group)
        self._event = on_event or (lambda _: None)
        named = os.path.abspath(root) if disk_of(self._root).has_folders else str(root)
        name = hashlib.sha256(named.encode()).hexdigest()[:16]
        self._folder = Path(folder) / f"mt-copies-{name}"
        found = self._ranks.phase(self._describe, _agreed)
        self._run: str = found["run"]
        to: list[int | None] = found["to"]
        self._to, self._from = (
            to[self._ranks.rank],
            [r for r, n in enumerate(to) if n == self._ranks.rank],
        )

    def save(self, step: int, shards: Iterable[TensorShard], metadata: dict[str, Any]) -> None:
        """Copy the state of a step, and remove the copies of earlier steps.

        Args:
            step: The step, later than the step of the last copy.
            shards: See `save_checkpoint`.
            metadata: See `save_checkpoint`.

        Raises:
            CheckpointError: The memory is full, or a rank failed; the same error on every rank.
        """
        self._event("copy.begin")
        own = [shard for shard in shards if shard.write]
        boxes = [
            [s.name, s.offsets, list(s.tensor.shape), s.global_shape, dtype_name(s.tensor.dtype)]
            for s in own
        ]
        head = json.dumps({"boxes": boxes, "metadata": metadata}).encode()
        found = self._ranks.phase(
            lambda: {"size": len(head), "named": self._named()},
            lambda all_: {"sizes": [each["size"] for each in all_], "named": all_[0]["named"]},
        )
        common = {"run": self._run, "ranks": self._ranks.size, "named": found["named"]}
        pieces = {self._ranks.rank: (head, [shard.tensor for shard in own])}
        pieces |= self._exchange(head, own, found["sizes"])

        def write() -> None:
            for rank, (described, tensors) in pieces.items():
                numbered = [TensorShard(str(n), tensor) for n, tensor in enumerate(tensors)]
                save_checkpoint(self._piece(rank), step, numbered, json.loads(described) | common)
                self._event("copy.piece")

        self._ranks.phase(write, lambda _: None)
        self._event("copy.whole")
        for path in self._folder.glob("rank_*"):
            for number, old in committed_steps(path).items():
                if number < step:
                    shutil.rmtree(old, ignore_errors=True)

    def restore(self) -> Path | None:
        """Make a checkpoint of the newest copy if it is newer than the one to resume from.

        Every piece must be on one of the nodes; the number of ranks may differ. A copy is not used
        if `latest` was set back, or the folder of checkpoints was deleted, after it was made. With
        a damaged piece there is a warning, and no copy is used. The copies are removed in any case.

        Returns:
            The step directory; None if nothing was made.

        Raises:
            CheckpointError: The checkpoint can't be saved; the copies stay.
        """
        path, shards = None, list[TensorShard]()
        plan = self._ranks.phase(self._held, self._newest)
        if plan is not None:
            try:
                metadata = self._ranks.phase(
                    lambda: self._read(plan, shards),
                    lambda all_: next(m for m in all_ if m is not None),
                )
            except CheckpointError as error:
                if self._ranks.rank == 0:
                    warnings.warn(f"the copy of step {plan['step']}: {error}", stacklevel=2)
            else:
                step, group = plan["step"], self._ranks.group
                path = save_checkpoint(self._root, step, shards, metadata, group=group)
        self.clear()
        return path

    def clear(self) -> None:
        """Remove the copies from the memory of all nodes."""

        def remove() -> None:
            for path in self._folder.glob("rank_*"):
                shutil.rmtree(path, ignore_errors=True)

        self._ranks.phase(remove, lambda _: None)

    def _describe(self) -> dict[str, str]:
        with disk_errors("create", self._folder):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            found = self._folder.lstat()
            if found.st_uid != os.getuid():
                raise PermissionError(None, "it is another user's; name another folder")
        boot = Path("/proc/sys/kernel/random/boot_id")
        machine = boot.read_text() if boot.exists() else str(uuid.getnode())
        run = self._run_id() if self._ranks.rank == 0 else ""
        return {"node": f"{machine} {found.st_dev} {found.st_ino}", "run": run}

    def _run_id(self) -> str:
        disk, path = disk_of(self._root), self._root / _ID
        try:
            return disk.read(self._root, _ID, limit=64).decode()
        except MissingFileError:
            run = uuid.uuid4().hex
            make_folders(disk, self._root)
            create_file(disk, path, run.encode())
            sync(disk, path)
            return run

    def _named(self) -> int:
        """Return the step to resume from, on rank 0; -1 without one."""
        path = latest_checkpoint(self._root) if self._ranks.rank == 0 else None
        step = None if path is None else step_of(path)
        return -1 if step is None else step

    def _piece(self, rank: int) -> Path:
        return self._folder / f"rank_{rank:06d}"

    def _exchange(
        self, head: bytes, own: list[TensorShard], sizes: list[int]
    ) -> dict[int, tuple[bytes, list[torch.Tensor]]]:
        """Send this rank's piece to the next node, and return the received pieces, by rank."""

        def swap(mine: np.ndarray | None, expected: dict[int, int]) -> dict[int, np.ndarray]:
            outgoing = {} if self._to is None or mine is None else {self._to: mine}
            return self._ranks.exchange(outgoing, expected)

        arrived = swap(_as_bytes(head), {rank: sizes[rank] for rank in self._from})
        heads = {rank: data.tobytes() for rank, data in arrived.items()}
        boxes = {rank: json.loads(each)["boxes"] for rank, each in heads.items()}
        tensors: dict[int, list[torch.Tensor]] = {rank: [] for rank in boxes}
        count = len(own) if self._to is not None else 0
        for number in range(max(count, *map(len, boxes.values()), 0)):
            mine = to_stored(own[number].tensor) if number < count else None
            coming = {rank: each[number] for rank, each in boxes.items() if number < len(each)}
            expected = {
                rank: _num_bytes(shape, dtype) for rank, (_, _, shape, _, dtype) in coming.items()
            }
            arrived = swap(None if mine is None else _as_bytes(mine), expected)
            for rank, (_, _, shape, _, dtype) in coming.items():
                values = arrived[rank].view(stored_dtype(dtype)).reshape(shape)
                tensors[rank].append(from_stored(values, dtype))
        return {rank: (heads[rank], tensors[rank]) for rank in heads}

    def _held(self) -> dict[str, Any]:
        """List the pieces of this run on this node: step, rank, number of ranks, step named."""
        held = []
        for piece in sorted(self._folder.glob("rank_*")):
            for step, path in committed_steps(piece).items():
                try:
                    found = inspect_checkpoint(path).metadata
                except CheckpointError:
                    continue
                if found.get("run") == self._run:
                    rank = int(piece.name.removeprefix("rank_"))
                    held.append([step, rank, found["ranks"], found["named"]])
        return {"held": held, "named": self._named()}

    def _newest(self, reports: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the newest step with all pieces, and the pieces for each rank to read."""
        named, holders = reports[0]["named"], dict[tuple[int, int], dict[int, list[int]]]()
        for rank, report in enumerate(reports):
            for step, piece, ranks, then in report["held"]:
                if then <= named < step:
                    holders.setdefault((step, ranks), {}).setdefault(piece, []).append(rank)
        for (step, ranks), by_piece in sorted(holders.items(), reverse=True):
            if by_piece.keys() == set(range(ranks)):
                reads: list[list[int]] = [[] for _ in reports]
                for piece, there in by_piece.items():
                    reads[there[piece % len(there)]].append(piece)
                return {"step": step, "reads": reads}
        return None

    def _read(self, plan: dict[str, Any], shards: list[TensorShard]) -> dict[str, Any] | None:
        """Read this rank's pieces into `shards`, and return the metadata of the run."""
        metadata = None
        for piece in plan["reads"][self._ranks.rank]:
            path = committed_steps(self._piece(piece))[plan["step"]]
            described = inspect_checkpoint(path).metadata
            found = [
                TensorShard(
                    name,
                    torch.empty(shape, dtype=getattr(torch, dtype)),
                    global_shape=whole,
                    offsets=offsets,
                )
                for name, offsets, shape, whole, dtype in described["boxes"]
            ]
            load_checkpoint(
                path, [TensorShard(str(n), each.tensor) for n, each in enumerate(found)]
            )
            shards += found
            metadata = described["metadata"]
        return metadata


def _agreed(reports: list[dict[str, str]]) -> dict[str, Any]:
    """Return the run, and for each rank the receiver of its piece on the next node, if any."""
    nodes: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        nodes.setdefault(report["node"], []).append(rank)
    members, to = list(nodes.values()), dict[int, int | None]()
    for ranks, following in zip(members, [*members[1:], members[0]], strict=True):
        for place, rank in enumerate(ranks):
            to[rank] = following[place % len(following)] if len(members) > 1 else None
    return {"run": reports[0]["run"], "to": [to[rank] for rank in range(len(reports))]}


def _num_bytes(shape: list[int], dtype: str) -> int:
    return int(np.prod(shape, dtype=np.int64)) * stored_dtype(dtype).itemsize


def _as_bytes(data: bytes | np.ndarray) -> np.ndarray:
    if isinstance(data, bytes):
        return np.frombuffer(bytearray(data), np.uint8)
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
