"""Loading: any box of any array, from whatever boxes it was saved."""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mt_ckpt.array import CRC_BYTES, ArraySpec, chunk_file
from mt_ckpt.disk import list_files
from mt_ckpt.dtype import dtype_name, from_stored
from mt_ckpt.error import CheckpointError, Problem
from mt_ckpt.grid import Box, chunk_indices, overlap
from mt_ckpt.manifest import MANIFEST, FileRecord, Manifest, read_manifest
from mt_ckpt.ranks import Ranks
from mt_ckpt.shard import TensorShard

_ADVICE = "Load another step, or restore the files from a copy."


def load_checkpoint(
    path: str | Path,
    shards: Sequence[TensorShard],
    *,
    group: dist.ProcessGroup | None = None,
    ignore: Sequence[str] = (),
    cast: bool = False,
) -> dict[str, Any]:
    """Fill the tensors of `shards`, in place, from a checkpoint saved on any layout.

    Every file that is read is checked against the manifest first, and the directory must hold
    exactly the files of the manifest, in their sizes. All ranks must load the same checkpoint.
    Loading is strict: all arrays that are missing, not asked for, of another shape or of another
    dtype are listed in one error, before anything is filled.

    Args:
        path: A step directory, such as `latest_checkpoint(root)`.
        shards: The boxes that this rank wants (`write` does not matter).
        group: All ranks that load together; then the arrays not asked for are those that no rank
            asks for, and a failure is raised on every rank. None: this process loads alone.
        ignore: Name prefixes of arrays that need not be asked for, such as `("optimizer/",)`.
        cast: Convert between floating-point dtypes, where the tensor's is not the saved one.

    Returns:
        The metadata given to `save_checkpoint`.

    Raises:
        CheckpointError: Nothing usable, or not what was asked for; it names files and tensors.
            Tensors may be partly filled if a damaged chunk is what failed.
    """
    ranks = Ranks(group)
    load = _Load(Path(path), list(shards), tuple(ignore), cast)
    ranks.phase(load.match, load.compare)
    ranks.phase(load.read, lambda _: None)
    return load.manifest.metadata


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The metadata of a checkpoint; reads and checks its manifest only.

    Raises:
        CheckpointError: The manifest is missing, damaged or of a newer format.
    """
    return read_manifest(Path(path)).metadata


def verify_checkpoint(path: str | Path) -> list[Problem]:
    """Check every byte of a checkpoint directory.

    Returns:
        All problems; an empty list if there is none.
    """
    path = Path(path)
    try:
        manifest = read_manifest(path)
        problems = _inventory(path, manifest)
    except CheckpointError as error:
        return [Problem(file=error.file or MANIFEST, reason=str(error))]
    bad = {problem.file for problem in problems}
    for name in sorted(set(manifest.files) - bad):
        try:
            _read_checked(path / name, manifest.files[name])
        except _DamageError as error:
            tensor = manifest.tensor_of(name)
            problems.append(Problem(file=name, tensor=tensor, reason=str(error)))
    return problems


def _inventory(path: Path, manifest: Manifest) -> list[Problem]:
    """Compare the files that are there with those that should be."""
    found, odd = list_files(path)
    problems = [
        Problem(file=name, tensor=manifest.tensor_of(name), reason=reason)
        for name, reason in sorted(odd.items())
    ]
    for name, record in sorted(manifest.files.items()):
        if name in odd or found.get(name) == record.size:
            continue
        reason = _wrong_size(found[name], record) if name in found else "is missing"
        problems.append(Problem(file=name, tensor=manifest.tensor_of(name), reason=reason))
    for name in sorted(found.keys() - set(manifest.files) - {MANIFEST}):
        reason = "is not in the manifest; if it is not yours, do not trust this checkpoint"
        problems.append(Problem(file=name, tensor=manifest.tensor_of(name), reason=reason))
    return problems


def _wrong_size(size: int, record: FileRecord) -> str:
    return f"has {size} bytes, the manifest says {record.size}"


class _DamageError(Exception):
    """What is wrong with a file, in words that follow its name."""


def _read_checked(file: Path, record: FileRecord) -> np.ndarray:
    """The bytes of a file, which are those that were written, or _DamageError."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            if size != record.size:
                raise _DamageError(_wrong_size(size, record))
            stream.seek(0)
            data = np.empty(size, dtype=np.uint8)
            if stream.readinto(data.data) != size:
                raise _DamageError("got shorter while it was read")
    except OSError as error:
        raise _DamageError(f"cannot be read: {error.strerror or error}") from error
    if hashlib.sha256(data.data).hexdigest() != record.sha256:
        raise _DamageError(
            "its content is not what was written: the sha256 differs from the manifest's"
        )
    return data


def _read(path: Path, manifest: Manifest, name: str) -> np.ndarray:
    try:
        return _read_checked(path / name, manifest.files[name])
    except _DamageError as error:
        problem = Problem(file=name, tensor=manifest.tensor_of(name), reason=str(error))
        raise CheckpointError.from_problems(f"{path} is damaged", [problem], _ADVICE) from error


@dataclass
class _Load:
    path: Path
    shards: list[TensorShard]
    ignore: tuple[str, ...]
    cast: bool
    manifest: Manifest = field(init=False)

    def match(self) -> dict[str, Any]:
        """Every rank: check the directory, and compare what is there with what is wanted."""
        self.manifest = read_manifest(self.path)
        problems = _inventory(self.path, self.manifest)
        if problems:
            raise CheckpointError.from_problems(f"{self.path} is damaged", problems, _ADVICE)
        for name in self.manifest.files:
            if name.rpartition("/")[2] == "zarr.json":
                _read(self.path, self.manifest, name)
        arrays = self.manifest.arrays
        return {
            "checkpoint": f"step {self.manifest.step}, content {_digest(self.manifest)}",
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
        """Rank 0: list everything that does not fit."""
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
        lines += [f"{name}: in the checkpoint, but nobody asks for it" for name in unused]
        lines += differ
        if lines:
            first = (missing + unused + [line.partition(":")[0] for line in differ])[0]
            raise CheckpointError(
                "\n  ".join([f"{self.path} does not hold what was asked for:", *lines])
                + "\nArrays that may stay unread are named by ignore=('prefix/', ...)",
                tensor=first,
            )

    def read(self) -> None:
        """Every rank: fill its tensors."""
        for shard in self.shards:
            _read_shard(self.path, self.manifest, shard)


def _digest(manifest: Manifest) -> str:
    """A short name of what a checkpoint holds."""
    return hashlib.sha256(repr(sorted(manifest.files.items())).encode()).hexdigest()[:12]


def _near(name: str, candidates: list[str]) -> str:
    near = difflib.get_close_matches(name, candidates[:500], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _read_shard(path: Path, manifest: Manifest, shard: TensorShard) -> None:
    spec = manifest.arrays[shard.name]
    box = Box(offsets=shard.offsets, shape=tuple(shard.tensor.shape))
    with torch.no_grad():
        for index in chunk_indices(box, spec.chunks):
            data = _read(path, manifest, chunk_file(shard.name, index))
            chunk = data[:-CRC_BYTES].view(spec.stored).reshape(spec.chunks)
            in_box, in_chunk = overlap(box, index, spec.chunks)
            shard.tensor[in_box].copy_(from_stored(chunk[in_chunk], spec.dtype))
