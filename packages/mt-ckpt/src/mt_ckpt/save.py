"""Saving: every rank writes its boxes, then one rank commits the whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from mt_files import check_type

from mt_ckpt.array import PACKS, ArraySpec
from mt_ckpt.digest import digest_of
from mt_ckpt.disk import (
    Disk,
    create_all,
    create_file,
    disk_errors,
    in_threads,
    make_folders,
    sync_all,
    write_blocks,
)
from mt_ckpt.dtype import dtype_name
from mt_ckpt.error import CheckpointError
from mt_ckpt.grid import Box, chunk_indices
from mt_ckpt.manifest import Manifest, step_name
from mt_ckpt.metadata import zarr_documents
from mt_ckpt.path import as_path, disk_of
from mt_ckpt.plan import describe_shards, own_shards, plan_arrays
from mt_ckpt.ranks import Ranks
from mt_ckpt.root import (
    LATEST,
    Keep,
    committed_steps,
    lock_root,
    named_checkpoint,
    retain,
)
from mt_ckpt.shard import TensorShard
from mt_ckpt.stored.chunk import ChunkWriter
from mt_ckpt.stored.gathering import Gathering, Kind, packs_from_json, packs_to_json
from mt_ckpt.stored.packing import Pack
from mt_ckpt.value import FileRecord, check_metadata

if TYPE_CHECKING:
    from mt_ckpt.publication import StoredStep
    from mt_ckpt.stored.commit import FolderStep


def save_checkpoint(
    root: str | Path,
    step: int,
    shards: Iterable[TensorShard],
    metadata: dict[str, Any],
    *,
    group: dist.ProcessGroup | None = None,
    keep: int | Keep | None = None,
    on_event: Callable[[str], None] | None = None,
) -> Path:
    """Save arrays whose boxes are spread over the ranks of `group`.

    All files are written and synced under a hidden name, which is then renamed to
    `root/step_00000020`; after that `root/latest` names it. Whenever a process is killed, the
    checkpoint that `latest` names is complete. Small gathers and broadcasts run over `group`, and
    boxes of small arrays that several ranks hold go to one of them. From its plan to the removal
    of old steps, a save holds a lock on `root`.

    Args:
        root: Folder of the checkpoints, on a file system that all ranks share; or its URL in an
            object store, such as `s3://bucket/run/checkpoints`.
        step: Training step. A committed directory of this step is replaced, unless `latest` names
            it (it stems from a save killed just before its end, or from before a run went back).
        shards: This rank's boxes. Over all ranks, the shards with `write=True` must cover every
            element of every array exactly once; a rank with a `replica` may write in place of
            another. Each shard is released when it is written, so boxes without another owner, such
            as pages of a file, are not in memory together.
        metadata: JSON values with string keys; rank 0's are stored. Tuples become lists.
        group: All ranks that save; needs a CPU backend (gloo). None: this process saves alone.
        keep: Number of checkpoints to keep, including this one; with a `Keep`, every m-th step too.
            None: all.
        on_event: Called with the points reached: on every rank `save.begin`, `save.arrays` (the
            plan is agreed and the metadata on disk), `save.data` (this rank's chunks are synced);
            then on rank 0 `save.manifest`, `save.before_rename`, `save.after_rename`,
            `save.after_latest`.

    Returns:
        The step directory.

    Raises:
        CheckpointError: A rank failed, or another process saves to `root` (the message names it);
            the same error on every rank. The temporary directory is removed, and earlier
            checkpoints are unchanged.
    """
    event, path = on_event or (lambda _: None), as_path(root)
    save = Save(path, step, list(shards), metadata, keep=keep, event=event, disk=disk_of(path))
    save.locks = True
    return save.run(Ranks(group))


@dataclass
class Save:
    """One save on one rank; see `save_checkpoint` for the arguments.

    Attributes:
        locks: Whether to lock `root`; a caller that decides by its contents holds the lock already.
        disk: The disk to which everything is written.
        check: Raises an error if the lock on `root` is lost.
    """

    root: Path
    step: int
    shards: list[TensorShard]
    metadata: dict[str, Any]
    _: KW_ONLY
    keep: int | Keep | None
    event: Callable[[str], None]
    locks: bool = False
    disk: Disk = field(default_factory=Disk)
    check: Callable[[], None] = field(default=lambda: None, init=False)
    # Set on rank 0 only: where the step is being made, and its arrays.
    place: FolderStep | StoredStep | None = field(default=None, init=False)
    arrays: dict[str, ArraySpec] = field(default_factory=dict, init=False)
    # Set on every rank: whether there is a plan, its chunks and slices by array, and its packs.
    agreed: bool = field(default=False, init=False)
    grids: dict[str, list[list[int]]] = field(default_factory=dict, init=False)
    packs: tuple[list[Pack], dict[str, Kind]] = field(default=([], {}), init=False)
    files: dict[str, FileRecord] = field(default_factory=dict, init=False)
    lock: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False)

    def agree(self, ranks: Ranks) -> None:
        """Plan the save with the other ranks, and release all shards that this rank doesn't write.

        Nothing is written; `run` calls this unless it was called before.
        """
        self.own(ranks.phase(self.describe, self.plan), ranks.rank)

    def run(self, ranks: Ranks) -> Path:
        """Save together with the other ranks, and return the step directory."""
        with self.lock:
            try:
                if self.agreed:
                    plan = ranks.phase(lambda: None, lambda _: self.prepare())
                else:
                    plan = ranks.phase(
                        self.describe, lambda found: self.plan(found) | self.prepare()
                    )
                    self.own(plan, ranks.rank)
                packs, kinds = self.packs
                gathering = Gathering(packs, kinds, self.shards, ranks.rank)
                if gathering.moves:
                    ranks.phase(lambda: gathering.exchange(ranks), lambda _: None)
                ranks.phase(lambda: self.write(plan, gathering), self.commit)
            except BaseException:
                if self.place is not None:
                    self.place.discard()
                raise
        return self.root / step_name(self.step)

    def describe(self) -> dict[str, Any]:
        """Describe this rank's boxes, on every rank."""
        if type(self.step) is not int or not 0 <= self.step < 10**18:
            raise ValueError(f"step must be an int from 0 to 10**18 - 1, not {self.step!r}")
        if not (self.keep is None or isinstance(self.keep, Keep)):
            self.keep = Keep(self.keep)  # or say what is wrong with it
        self.event("save.begin")
        for shard in self.shards:
            check_type("every one of shards", shard, TensorShard)
        return {"step": self.step, "shards": describe_shards(self.shards)}

    def plan(self, reports: list[dict[str, Any]]) -> dict[str, Any]:
        """Check all boxes, and choose the chunks and their writers, on rank 0."""
        check_metadata(self.metadata)
        steps = [report["step"] for report in reports]
        if set(steps) != {self.step}:
            raise CheckpointError(f"the ranks save different steps: {steps}")
        plan = plan_arrays([report["shards"] for report in reports])
        self.arrays = plan.arrays
        return {
            "grids": {
                name: [spec.chunks, spec.slices]
                for name, spec in plan.arrays.items()
                if spec.pack is None
            },
            "writers": plan.writers,
            "packs": packs_to_json(plan.packs, plan.arrays),
        }

    def own(self, plan: dict[str, Any], rank: int) -> None:
        """Keep the boxes that this rank writes, on every rank."""
        self.grids, self.agreed = plan["grids"], True
        self.packs = packs_from_json(plan["packs"])
        self.shards = own_shards(
            self.shards,
            rank,
            chunks={name: chunks for name, (chunks, _) in self.grids.items()},
            writers=plan["writers"],
            packs=self.packs[0],
        )

    def prepare(self) -> dict[str, Any]:
        """Write folders and metadata, on rank 0."""
        total = sum(spec.num_chunks * spec.chunk_bytes for spec in self.arrays.values())
        packs = sorted({spec.pack for spec in self.arrays.values() if spec.pack is not None})
        make_folders(self.disk, self.root)
        if self.locks:
            lock = lock_root(self.root, purpose=f"saving step {self.step}")
            self.check = self.lock.enter_context(lock)
        self.check_free()
        temp = self.begin()
        filed = {name: spec for name, spec in self.arrays.items() if spec.pack is None}
        documents = zarr_documents(filed, step=self.step, packs=packs)
        for path in sorted(documents, key=lambda path: Path(path).parent):  # parents come first
            folder = (temp / path).parent
            with disk_errors("create", folder):
                self.disk.mkdir(folder)
            content = documents[path]
            self.files[path] = FileRecord(size=len(content), digest=digest_of(content))

            if self.disk.has_folders:
                create_file(self.disk, temp / path, content, total=total)
        if not self.disk.has_folders:  # all at once, as each answer takes long
            create_all(self.disk, {temp / path: content for path, content in documents.items()})
        if packs:
            with disk_errors("create", temp / PACKS):
                self.disk.mkdir(temp / PACKS)
        return {"temp": "/".join(temp.parts[len(self.root.parts) :]), "total": total}

    def begin(self) -> Path:
        """Choose the folder of the unfinished step; from here on a failure removes the folder."""
        if self.disk.has_folders:
            from mt_ckpt.stored.commit import FolderStep

            self.place = FolderStep(self.disk, self.root, self.step)
        else:
            from mt_ckpt.publication import StoredStep

            self.place = StoredStep(self.disk, self.root, self.step, check=self.check)
        return self.place.path

    def check_free(self) -> int | None:
        """Refuse to replace a final step, and return the step that `latest` names, if any."""
        final, named = self.root / step_name(self.step), named_checkpoint(self.root)
        if named == final:
            raise CheckpointError(
                f"{named} is saved already, and {self.root / LATEST} names it. To save this step "
                f"again, let {LATEST} name another step first, or save to another root",
                file=str(named),
            )
        steps = committed_steps(self.root)
        if self.step not in steps and self.disk.exists(final):
            raise CheckpointError(
                f"{final} exists and is no checkpoint of mt-ckpt; remove or rename it",
                file=str(final),
            )
        return next((step for step, path in steps.items() if path == named), None)

    def write(self, plan: dict[str, Any], gathering: Gathering) -> dict[str, list[Any]]:
        """Write and sync the packs of this rank and the chunks of its boxes, on every rank."""
        self.event("save.arrays")
        temp = self.root / plan["temp"]
        if not self.disk.is_folder(temp):
            raise CheckpointError(
                f"{temp}, which rank 0 has created, is not visible on this rank: root has to be "
                "on a file system that all ranks share",
                file=str(temp),
            )

        def write(task: tuple[TensorShard, tuple[int, ...], ArraySpec]) -> list[Any]:
            chunk = ChunkWriter(*task)
            path = temp / chunk.path
            write_blocks(self.disk, path, chunk.blocks(), size=chunk.size, total=plan["total"])
            return [chunk.path, chunk.size, chunk.sums.digest, chunk.slice_sums]

        records: dict[str, list[Any]] = {}
        for pack in gathering.own:
            content, offsets = gathering.content(pack, step=self.step)
            create_file(self.disk, temp / pack.file, content, total=plan["total"])
            records[pack.file] = [len(content), digest_of(content), "", offsets]
        written = in_threads(write, self.chunks(), threads=self.disk.threads)
        records |= {item[0]: item[1:] for item in written}
        files = [*self.files, *records]  # self.files: the documents, on rank 0
        sync_all(self.disk, (temp / path for path in files))
        folders = {parent for path in files for parent in Path(path).parents}
        sync_all(self.disk, (temp / folder for folder in sorted(folders - {Path()})))
        self.event("save.data")
        return records

    def chunks(self) -> Iterator[tuple[TensorShard, tuple[int, ...], ArraySpec]]:
        """Yield box, index and array of each chunk that this rank writes."""
        # Each shard is popped, so that its memory is free once it is written.
        self.shards.reverse()
        while self.shards:
            shard = self.shards.pop()
            if shard.name in self.grids:
                chunks, slices = self.grids[shard.name]
                spec = ArraySpec(
                    shape=shard.global_shape,
                    dtype=dtype_name(shard.tensor.dtype),
                    chunks=tuple(chunks),
                    slices=None if slices is None else tuple(slices),
                )
                box = Box(offsets=shard.offsets, shape=tuple(shard.tensor.shape))
                for index in chunk_indices(box, spec.chunks):
                    yield shard, index, spec

    def commit(self, reports: list[dict[str, list[Any]]]) -> None:
        """Publish the step, and remove old checkpoints, on rank 0."""
        for report in reports:
            for path, (size, digest, sums, *offsets) in report.items():
                self.files[path] = FileRecord(size=size, digest=digest, sums=sums)
                for name, offset in (offsets[0] if offsets else {}).items():
                    self.arrays[name] = replace(self.arrays[name], offset=offset)
        assert self.place is not None, "prepare has chosen it"  # noqa: S101 - for the type checker
        manifest = Manifest(
            step=self.step,
            metadata=self.metadata,
            arrays=self.arrays,
            files=self.files,
            folder=self.place.folder,
        )
        named = self.place.publish(manifest, check_free=self.check_free, event=self.event)
        if isinstance(self.keep, Keep):
            retain(self.disk, self.root, self.keep, self.step, after=named)
