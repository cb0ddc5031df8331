"""Checking every byte of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from mt_files import FileError, parse_json

from mt_ckpt.error import CheckpointError, Problem
from mt_ckpt.hold import hold_checkpoint
from mt_ckpt.manifest import MANIFEST, Manifest, read_manifest
from mt_ckpt.metadata import zarr_documents
from mt_ckpt.stored.content import (
    DamageError,
    check_chunk,
    check_pack,
    damage,
    inventory,
    read_file,
)
from mt_ckpt.stored.packing import pack_bytes, read_zip


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
    problems = inventory(path, manifest)
    bad = {problem.file for problem in problems}
    filed = {name: spec for name, spec in manifest.arrays.items() if spec.pack is None}
    documents = zarr_documents(filed, step=manifest.step, packs=sorted(manifest.packs))
    for name in sorted(set(manifest.files) - bad):
        try:
            if name in documents:
                content = read_file(path, manifest, name)
                _check_document(path, manifest, name, content, documents[name])
            elif name in manifest.packs:
                _check_pack(path, manifest, name)
            else:
                check_chunk(path, manifest, name, manifest.arrays[name.rpartition("/")[0]])
        except DamageError as error:
            problems.append(error.problem)
    return problems


def _check_pack(path: Path, manifest: Manifest, name: str) -> None:
    """Raise DamageError if a pack is damaged, or its zip holds other arrays than the manifest."""
    content, arrays = check_pack(path, manifest, name), manifest.packs[name]
    chunks = {
        array: np.frombuffer(content, np.uint8, spec.chunk_bytes, spec.offset)
        for array, spec in arrays.items()
    }
    if pack_bytes(arrays, chunks, step=manifest.step)[0] == content:
        return
    # The zip or a document has another form, which may be equivalent.
    entries, problem = read_zip(content, arrays, step=manifest.step)
    if problem:
        raise damage(path, manifest, name, problem)
    for entry, expected in zarr_documents(arrays, step=manifest.step).items():
        _check_document(path, manifest, name, entries[entry], expected)


def _check_document(
    path: Path, manifest: Manifest, name: str, data: bytes, expected: bytes
) -> None:
    """Raise DamageError if a zarr.json describes other arrays than the manifest."""
    try:
        found = parse_json(data, name=path / name)
    except FileError as error:
        raise damage(path, manifest, name, error.problem) from error
    if where := _difference(found, json.loads(expected), ""):
        reason = f"contradicts the manifest in {where}, so other programs would read other values"
        raise damage(path, manifest, name, reason)


def _difference(found: object, expected: object, where: str) -> str | None:
    """Return the place where two JSON values differ.

    An empty value counts as absent, since versions of zarr-python write either.
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
