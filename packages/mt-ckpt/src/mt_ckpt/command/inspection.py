"""`mt-ckpt inspect` and `mt-ckpt verify`: the content of a checkpoint, and its integrity."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_files import parse_json, say, shorten

from mt_ckpt.array import ArraySpec
from mt_ckpt.command.place import checkpoints_of
from mt_ckpt.error import CheckpointError
from mt_ckpt.exchange.arrays import bytes_of
from mt_ckpt.hold import hold_checkpoint
from mt_ckpt.load import inspect_checkpoint
from mt_ckpt.manifest import MANIFEST, Manifest
from mt_ckpt.path import disk_of
from mt_ckpt.verify import verify_checkpoint

_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_MANIFEST_BYTES = 1 << 29


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Print the content of a checkpoint, from its manifest alone.

    Attributes:
        path: A run folder, a folder of checkpoints, or a step directory.
        step: The step in the folder; by default the latest.
        json: Print JSON: step, programs that wrote it, metadata, and the arrays with shape, dtype
            and bytes.
    """

    path: Path
    step: int | None = None
    json: bool = False

    def run(self) -> int:
        """Run the command."""
        with hold_checkpoint(checkpoints_of(self.path), self.step) as found:
            manifest = inspect_checkpoint(found)
            writers = _writers(found)
        if self.json:
            say(json.dumps(_plain(manifest, writers), indent=2))
            return 0
        total = sum(map(bytes_of, manifest.arrays.values()))
        say(str(found))
        say(f"step {manifest.step}: {len(manifest.arrays)} arrays of {size_text(total)}")
        say("written by " + ", ".join(f"{name} {number}" for name, number in writers.items()))
        layout = manifest.metadata.get("layout")
        if isinstance(layout, dict):
            say("layout " + ", ".join(f"{axis} {size}" for axis, size in layout.items()))
        for key, value in manifest.metadata.items():
            if key != "layout":
                say(f"{key}: {shorten(value)}")
        for line in _tree(manifest.arrays):
            say(line)
        return 0


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Check every byte of a checkpoint; the exit status is 1 if it is damaged.

    Each problem is a line with the file, and the array to which it belongs.

    Attributes:
        path: A run folder, a folder of checkpoints, or a step directory.
        step: The step in the folder; by default the latest.
    """

    path: Path
    step: int | None = None

    def run(self) -> int:
        """Run the command."""
        path = checkpoints_of(self.path)
        if not disk_of(path).is_folder(path):
            raise CheckpointError(f"{path}: no such checkpoint directory", file=str(path))
        if self.step is not None:
            with hold_checkpoint(path, self.step) as found:
                return _verify(found)
        return _verify(path)


def size_text(size: int) -> str:
    """Format a number of bytes: 1.5 MiB."""
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"


def _verify(path: Path) -> int:
    problems = verify_checkpoint(path)
    for problem in problems:
        say(" ".join(str(problem).split("\n")))
    if not problems:
        say(f"{path}: sound")
    return 1 if problems else 0


def _writers(checkpoint: Path) -> dict[str, str]:
    """Return the versions of the programs that wrote a checkpoint, after a check of its seal."""
    content = disk_of(checkpoint).read(checkpoint, MANIFEST, limit=_MANIFEST_BYTES)
    body = parse_json(content, name=checkpoint / MANIFEST)
    versions = body.get("versions")
    return versions if isinstance(versions, dict) else {}


def _plain(manifest: Manifest, writers: Mapping[str, str]) -> dict[str, Any]:
    return {
        "step": manifest.step,
        "written_by": dict(writers),
        "metadata": manifest.metadata,
        "arrays": {
            name: {"shape": list(spec.shape), "dtype": spec.dtype, "bytes": bytes_of(spec)}
            for name, spec in manifest.arrays.items()
        },
    }


def _tree(arrays: Mapping[str, ArraySpec]) -> Iterator[str]:
    """Yield a line for each group and array, indented by its depth."""
    groups: dict[str, list[int]] = {}
    for name, spec in arrays.items():
        parts = name.split("/")
        for depth in range(1, len(parts)):
            groups.setdefault("/".join(parts[:depth]), []).append(bytes_of(spec))
    shown: set[str] = set()
    for name, spec in sorted(arrays.items()):
        parts = name.split("/")
        for depth in range(1, len(parts)):
            group = "/".join(parts[:depth])
            if group not in shown:
                shown.add(group)
                sizes = groups[group]
                text = f"{len(sizes)} arrays, {size_text(sum(sizes))}"
                yield f"{'  ' * (depth - 1)}{parts[depth - 1]}/  {text}"
        shape = f"[{', '.join(map(str, spec.shape))}]"
        line = f"{parts[-1]}  {spec.dtype} {shape}  {size_text(bytes_of(spec))}"
        yield "  " * (len(parts) - 1) + line
