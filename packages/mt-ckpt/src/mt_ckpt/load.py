"""Loading: any box of any array, whatever boxes it was saved as."""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from mt_files import check_type

from mt_ckpt.array import ArraySpec
from mt_ckpt.dtype import dtype_name
from mt_ckpt.error import CheckpointError
from mt_ckpt.hold import hold_checkpoint
from mt_ckpt.manifest import Manifest, check_step, read_manifest
from mt_ckpt.path import as_path
from mt_ckpt.ranks import Ranks
from mt_ckpt.shard import TensorShard
from mt_ckpt.stored.content import open_checkpoint
from mt_ckpt.stored.filling import Filler


def load_checkpoint(
    path: str | Path,
    shards: Sequence[TensorShard],
    *,
    group: dist.ProcessGroup | None = None,
    ignore: Sequence[str] = (),
    cast: bool = False,
) -> dict[str, Any]:
    """Fill the tensors of `shards`, in place, from a checkpoint saved on any layout.

    Every file is checked against the manifest before it is used, and the directory must contain
    exactly the files of the manifest, with their sizes. Loading is strict: before any
    tensor is filled, one error lists all missing arrays, all arrays without a shard, and all
    differences of shape and dtype.

    Args:
        path: A folder of checkpoints, from which rank 0 chooses like `hold_checkpoint`, or a step
            directory. No save removes the step during the load.
        shards: The boxes to fill on this rank (`write` does not matter).
        group: All ranks that load together. An array then counts as requested if any rank requests
            it, and a failure is raised on every rank. None: this process loads alone.
        ignore: Name prefixes of arrays that need not be requested, such as `("optimizer/",)`.
        cast: Whether to convert between floating-point dtypes.

    Returns:
        The metadata given to `save_checkpoint`.

    Raises:
        CheckpointError: The checkpoint is damaged or does not match the request; names files and
            tensors. After a damaged chunk, tensors may be partly filled.
    """
    ranks, root = Ranks(group), as_path(path)
    with contextlib.ExitStack() as stack:

        def choose(_: list[None]) -> str:
            found = stack.enter_context(hold_checkpoint(root))
            return "" if found == root else found.name

        folder = root / ranks.phase(lambda: None, choose)
        prefixes = (ignore,) if isinstance(ignore, str) else tuple(ignore)
        load = _Load(folder, list(shards), prefixes, cast)
        # Every rank holds the step from here on, and nothing is filled before all agree.
        ranks.phase(lambda: load.match(stack), load.compare)
        ranks.phase(load.read, lambda _: None)
    return load.manifest.metadata


@dataclass(frozen=True)
class ArrayReader:
    """An open checkpoint, for reading arrays one at a time.

    Attributes:
        path: The step directory.
        manifest: Its manifest.
    """

    path: Path
    manifest: Manifest

    def fill(self, shard: TensorShard) -> None:
        """Fill the tensor of a shard, which may have another floating-point dtype.

        Raises:
            CheckpointError: The array is missing or damaged, or has another shape.
        """
        spec = self.manifest.arrays.get(shard.name)
        if spec is None:
            near = _near(shard.name, list(self.manifest.arrays))
            raise CheckpointError(f"{self.path}: has no {shard.name}{near}", tensor=shard.name)
        if shard.global_shape != spec.shape:
            raise CheckpointError(
                f"{self.path}: {shard.name} has the shape {spec.shape}, and {shard.global_shape} "
                "is requested",
                tensor=shard.name,
            )
        self._filler.fill([shard])

    @functools.cached_property
    def _filler(self) -> Filler:
        return Filler(self.path, self.manifest)


@contextlib.contextmanager
def open_arrays(path: str | Path) -> Iterator[ArrayReader]:
    """Open a checkpoint to read arrays one at a time, with memory for a single array.

    For whole models use `load_checkpoint`, which checks that nothing is left out.

    Args:
        path: A folder of checkpoints or a step directory; see `hold_checkpoint`.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    with hold_checkpoint(path) as found:
        yield ArrayReader(found, open_checkpoint(found))


def inspect_checkpoint(path: str | Path) -> Manifest:
    """Read a checkpoint's manifest: step, metadata, and shape and dtype of every array.

    The manifest is checked; the arrays are not read.

    Args:
        path: A folder of checkpoints or a step directory; see `hold_checkpoint`.

    Raises:
        CheckpointError: The manifest is missing, damaged or of a newer format.
    """
    with hold_checkpoint(path) as found:
        manifest = read_manifest(found)
        check_step(found, manifest.step)
        return manifest


@dataclass
class _Load:
    path: Path
    shards: list[TensorShard]
    ignore: tuple[str, ...]
    cast: bool
    manifest: Manifest = field(init=False)

    def match(self, stack: contextlib.ExitStack) -> dict[str, Any]:
        """Hold and check the directory, and compare its arrays with the request, on every rank."""
        for shard in self.shards:
            check_type("every one of shards", shard, TensorShard)
        if not all(isinstance(prefix, str) for prefix in self.ignore):
            raise TypeError(f"ignore must be name prefixes, not {self.ignore!r:.100}")
        stack.enter_context(hold_checkpoint(self.path))
        self.manifest = open_checkpoint(self.path)
        arrays, files = self.manifest.arrays, sorted(self.manifest.files.items())
        # Ranks on different file systems may see different checkpoints of the same step.
        content = hashlib.sha256(repr(files).encode()).hexdigest()[:12]
        return {
            "checkpoint": f"step {self.manifest.step}, content {content}",
            "have": list(arrays),
            "want": [shard.name for shard in self.shards],
            "differ": [
                line
                for shard in self.shards
                if shard.name in arrays
                for line in self._differences(shard, arrays[shard.name])
            ],
        }

    def _differences(self, shard: TensorShard, spec: ArraySpec) -> list[str]:
        lines = []
        if shard.global_shape != spec.shape:
            lines.append(f"{shard.name}: saved shape {spec.shape}, wanted {shard.global_shape}")
        wanted = dtype_name(shard.tensor.dtype)
        if wanted != spec.dtype:
            is_float = shard.tensor.dtype.is_floating_point and "float" in spec.dtype
            if not (self.cast and is_float):
                way_out = " (cast=True converts)" if is_float else ""
                lines.append(f"{shard.name}: saved as {spec.dtype}, wanted as {wanted}{way_out}")
        return lines

    def compare(self, reports: list[dict[str, Any]]) -> None:
        """Report every mismatch, on rank 0."""
        checkpoints = [report["checkpoint"] for report in reports]
        if len(set(checkpoints)) > 1:
            raise CheckpointError(
                f"the ranks load different checkpoints: {checkpoints}; have one rank choose the "
                "path and tell the others, or put it on a file system that all share"
            )
        have = set(reports[0]["have"])
        want = {name for report in reports for name in report["want"]}
        differ = sorted({line for report in reports for line in report["differ"]})
        unused = sorted(name for name in have - want if not name.startswith(self.ignore))
        missing = sorted(want - have)
        lines = [f"{name}: not in the checkpoint{_near(name, unused)}" for name in missing]
        lines += [f"{name}: in the checkpoint, but not requested" for name in unused]
        lines += differ
        if lines:
            first = (missing + unused + [line.partition(":")[0] for line in differ])[0]
            raise CheckpointError(
                "\n  ".join([f"{self.path} does not match the request:", *lines])
                + "\nName arrays to leave unread with ignore=('prefix/', ...)",
                tensor=first,
            )

    def read(self) -> None:
        """Fill this rank's tensors."""
        Filler(self.path, self.manifest).fill(self.shards)


def _near(name: str, candidates: list[str]) -> str:
    near = difflib.get_close_matches(name, candidates[:500], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
