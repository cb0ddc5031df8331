"""The content of a step directory, checked against its manifest as it is read."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import torch
from mt_files import FileError, open_file, parse_json

from mt_ckpt.array import CRC_BYTES, chunk_file
from mt_ckpt.chunk import crc32c
from mt_ckpt.disk import list_files
from mt_ckpt.dtype import from_stored
from mt_ckpt.error import CheckpointError, Problem
from mt_ckpt.grid import Box, chunk_indices, overlap
from mt_ckpt.hold import hold_checkpoint
from mt_ckpt.manifest import MANIFEST, FileRecord, Manifest, other_step, read_manifest
from mt_ckpt.metadata import zarr_documents
from mt_ckpt.shard import TensorShard

_ADVICE = "Load another step, or restore the files from a copy."


def verify_checkpoint(path: str | Path) -> list[Problem]:
    """Check every byte of a checkpoint.

    Args:
        path: A folder of checkpoints or a step directory; see `hold_checkpoint`.

    Returns:
        All problems; an empty list if there are none.
    """
    try:
        with hold_checkpoint(path) as found:
            return _verify(found)
    except CheckpointError as error:
        return [Problem(file=error.file or MANIFEST, reason=str(error))]


def _verify(path: Path) -> list[Problem]:
    manifest = read_manifest(path)
    problems = _inventory(path, manifest)
    bad = {problem.file for problem in problems}
    documents = zarr_documents(manifest.arrays, step=manifest.step)
    for name in sorted(set(manifest.files) - bad):
        try:
            if name in documents:
                _check_document(path, manifest, name, documents[name])
            else:
                _read_chunk(path, manifest, name)
        except _DamageError as error:
            problems.append(error.problem)
    return problems


def _check_document(path: Path, manifest: Manifest, name: str, expected: bytes) -> None:
    """Raise _DamageError if a zarr.json describes other arrays than the manifest."""
    data = _read(path, manifest, name).tobytes()
    try:
        found = parse_json(data, name=path / name)
    except FileError as error:
        raise _damage(path, manifest, name, error.problem) from error
    if where := _difference(found, json.loads(expected), ""):
        reason = f"contradicts the manifest in {where}, so other programs would read other values"
        raise _damage(path, manifest, name, reason)


def _difference(found: object, expected: object, where: str) -> str | None:
    """Return the place where two JSON values differ.

    An empty value is as good as none, since versions of zarr-python differ in which they write.
    """
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted({*found, *expected}):
            below = f"{where}.{key}" if where else str(key)
            if place := _difference(found.get(key), expected.get(key), below):
                return f"{place:.200}"
        return None
    if json.dumps(found or None) == json.dumps(expected or None):
        return None
    return where or "its kind"


def _inventory(path: Path, manifest: Manifest) -> list[Problem]:
    """Compare the directory with the manifest."""
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
    if reason := other_step(path, manifest.step):
        problems.append(Problem(file=MANIFEST, reason=reason))
    for name in sorted(found.keys() - set(manifest.files) - {MANIFEST}):
        reason = "is not in the manifest; if it is not yours, do not trust this checkpoint"
        problems.append(Problem(file=name, tensor=manifest.tensor_of(name), reason=reason))
    return problems


def _wrong_size(size: int, record: FileRecord) -> str:
    return f"has {size} bytes, the manifest says {record.size}"


class _DamageError(CheckpointError):
    problem: Problem


def _read(path: Path, manifest: Manifest, name: str) -> np.ndarray:
    """Return the verified bytes of a file, or raise _DamageError."""
    record = manifest.files[name]
    try:
        with open_file(path / name, within=path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != record.size:
                raise _damage(path, manifest, name, _wrong_size(size, record))
            data = np.fromfile(stream, np.uint8, size)
    except FileError as error:
        raise _damage(path, manifest, name, error.problem) from error
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
        raise _damage(path, manifest, name, reason) from error
    if data.size != size:
        raise _damage(path, manifest, name, "got shorter while it was read")
    if hashlib.sha256(data.data).hexdigest() != record.sha256:
        reason = "its content has changed: the sha256 differs from the manifest's"
        raise _damage(path, manifest, name, reason)
    return data


def _read_chunk(path: Path, manifest: Manifest, name: str) -> np.ndarray:
    """Return the verified values of a chunk, as bytes, or raise _DamageError."""
    data = _read(path, manifest, name)
    values, crc = data[:-CRC_BYTES], data[-CRC_BYTES:]
    if not np.array_equal(crc, crc32c(values)):
        reason = "its crc32c is not that of its values, so other programs would refuse it"
        raise _damage(path, manifest, name, reason)
    return values


def _damage(path: Path, manifest: Manifest, name: str, reason: str) -> _DamageError:
    problem = Problem(file=name, tensor=manifest.tensor_of(name), reason=reason)
    error = _DamageError.from_problems(f"{path} is damaged", [problem], _ADVICE)
    error.problem = problem
    return error


def open_checkpoint(path: Path) -> Manifest:
    """Read the manifest of a step directory, and check all but the contents of its arrays."""
    manifest = read_manifest(path)
    problems = _inventory(path, manifest)
    if problems:
        raise CheckpointError.from_problems(f"{path} is damaged", problems, _ADVICE)
    for name in manifest.files:
        if name.rpartition("/")[2] == "zarr.json":
            _read(path, manifest, name)
    return manifest


def read_shard(path: Path, manifest: Manifest, shard: TensorShard) -> None:
    """Fill one box from the chunks that it overlaps."""
    spec = manifest.arrays[shard.name]
    box = Box(offsets=shard.offsets, shape=tuple(shard.tensor.shape))
    with torch.no_grad():
        for index in chunk_indices(box, spec.chunks):
            values = _read_chunk(path, manifest, chunk_file(shard.name, index))
            chunk = values.view(spec.stored).reshape(spec.chunks)
            in_box, in_chunk = overlap(box, index, spec.chunks)
            shard.tensor[in_box].copy_(from_stored(chunk[in_chunk], spec.dtype))
