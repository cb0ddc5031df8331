"""Checking every byte of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from mt_files import FileError, parse_json

from mt_ckpt.content import DamageError, damage, inventory, read_chunk, read_file
from mt_ckpt.error import CheckpointError, Problem
from mt_ckpt.hold import hold_checkpoint
from mt_ckpt.manifest import MANIFEST, Manifest, read_manifest
from mt_ckpt.metadata import zarr_documents


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
    documents = zarr_documents(manifest.arrays, step=manifest.step)
    for name in sorted(set(manifest.files) - bad):
        try:
            if name in documents:
                _check_document(path, manifest, name, documents[name])
            else:
                read_chunk(path, manifest, name)
        except DamageError as error:
            problems.append(error.problem)
    return problems


def _check_document(path: Path, manifest: Manifest, name: str, expected: bytes) -> None:
    """Raise DamageError if a zarr.json describes other arrays than the manifest."""
    data = read_file(path, manifest, name)
    try:
        found = parse_json(data, name=path / name)
    except FileError as error:
        raise damage(path, manifest, name, error.problem) from error
    if where := _difference(found, json.loads(expected), ""):
        reason = f"contradicts the manifest in {where}, so other programs would read other values"
        raise damage(path, manifest, name, reason)


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
