"""The manifest: the contents of a step directory, with size and hash of every file."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar, cast

import numpy as np
import torch
from mt_files import (
    FileError,
    MissingFileError,
    ObjectError,
    SchemaError,
    build,
    shorten,
)

from mt_ckpt.array import ArraySpec, group_names
from mt_ckpt.error import CheckpointError
from mt_ckpt.path import disk_of
from mt_ckpt.shard import check_name
from mt_ckpt.value import (
    MAX_BYTES,
    FileRecord,
    array_record,
    array_spec,
    check_metadata,
    file_record,
    too_large,
    typed,
)

T = TypeVar("T")
MANIFEST = "mt-manifest.json"
FORMAT_VERSION = 4
_WITHOUT_FOLDER = 3  # what version 4 adds is the folder
_STEP = re.compile(r"step_(\d{8,18})")
_FOLDER = re.compile(r"[0-9a-f]{32}")
_HEAD_BYTES = 4096
_NODE_BYTES = 8192  # of one node's document; ours have about 600
_PACK_NAME_BYTES = 64
_SEAL = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')
_ADVICE = "Load another step, or restore the file from a copy."


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a manifest.

    Attributes:
        step: Training step.
        metadata: Metadata given to `save_checkpoint`.
        arrays: Description of each array, by name.
        files: Size and hash of each file except the manifest, by relative path.
        folder: Folder in the step directory that the files are in; empty for the directory itself.
            In an object store each save has a folder of its own.
    """

    step: int
    metadata: dict[str, Any]
    arrays: dict[str, ArraySpec]
    files: dict[str, FileRecord]
    folder: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.step < 10**18:
            raise ValueError(f"step is {self.step}; a step is 0 to 10**18 - 1")
        for name in self.arrays:
            check_name(name)
        check_nesting(list(self.arrays))
        filed = {name: spec for name, spec in self.arrays.items() if spec.pack is None}
        groups = group_names(list(filed))
        # Counted before they are listed: a forged shape must not make us list 2**60 chunks.
        count = 1 + len(groups) + sum(1 + spec.num_chunks for spec in filed.values())
        count += len(self.packs)
        if count != len(self.files):
            raise ValueError(f"the arrays have {count} files, but {len(self.files)} are recorded")
        expected = {"zarr.json", *(f"{group}/zarr.json" for group in groups), *self.packs}
        for name, spec in filed.items():
            expected.add(f"{name}/zarr.json")
            for path in spec.chunk_files(name):
                expected.add(path)
                if path in self.files and self.files[path].size != spec.chunk_bytes:
                    raise ValueError(f"{path}: a chunk has {spec.chunk_bytes} bytes")
                if path in self.files and len(self.files[path].sums) != 8 * spec.num_sums:
                    raise ValueError(f"{path}: a chunk has {spec.num_sums} slices")
        if odd := sorted(expected ^ set(self.files)):
            raise ValueError(f"{odd[0]!r}: no array has it or no record has it")
        nodes = [*groups, *filed]
        limits = {f"{name}/zarr.json": _NODE_BYTES for name in nodes}
        limits["zarr.json"] = sum((_NODE_BYTES + len(name) for name in nodes), _NODE_BYTES)
        limits["zarr.json"] += _PACK_NAME_BYTES * len(self.packs)
        for path, limit in limits.items():
            if self.files[path].size > limit:
                raise ValueError(f"{path}: a document of Zarr has at most {limit} bytes here")
        for path, arrays in self.packs.items():
            self._check_pack(path, arrays)
        self._check_folder()

    def _check_folder(self) -> None:
        if self.folder and not _FOLDER.fullmatch(self.folder):
            raise ValueError(f"folder is {shorten(self.folder)}; it has 32 hexadecimal digits")

    def _check_pack(self, path: str, arrays: Mapping[str, ArraySpec]) -> None:
        """Raise ValueError if a pack is larger than a save writes, or a chunk lies outside."""
        size, nodes = self.files[path].size, [*group_names(list(arrays)), *arrays]
        limit = sum(2 * _NODE_BYTES + 8 * len(name) for name in nodes) + 2 * _NODE_BYTES
        limit += sum(spec.chunk_bytes for spec in arrays.values())
        if size > limit:
            raise ValueError(f"{path}: a pack of these arrays has at most {limit} bytes")
        for name, spec in arrays.items():
            if not 0 <= spec.offset <= size - spec.chunk_bytes:
                raise ValueError(f"{name}: its chunk lies outside of {path}")

    @functools.cached_property
    def packs(self) -> dict[str, dict[str, ArraySpec]]:
        """The arrays of each pack, by the pack's path."""
        found: dict[str, dict[str, ArraySpec]] = {}
        for name, spec in self.arrays.items():
            if spec.pack is not None:
                found.setdefault(spec.pack, {})[name] = spec
        return found

    def digests(self, prefix: str) -> dict[str, str]:
        """Return the digests of all files with arrays whose names start with `prefix`, by path."""
        paths = [path for path in self.files if path.startswith(prefix)]
        paths += [
            path
            for path, arrays in self.packs.items()
            if any(name.startswith(prefix) for name in arrays)
        ]
        return {path: self.files[path].digest for path in paths}

    def metadata_as(self, cls: type[T]) -> T:
        """Return the metadata of a run as a dataclass, with every type checked.

        Keys without a field in the dataclass are ignored.

        Raises:
            CheckpointError: The metadata lacks a field, or contradicts the checkpoint.
        """
        items = dataclasses.fields(cast("Any", cls))
        given = [item.name for item in items if item.name in self.metadata]
        missing = [item.name for item in items if item.name not in given and _is_needed(item)]
        step, problem = self.metadata.get("step", self.step), ""
        if missing:
            problem = f"it lacks {', '.join(missing)}"
        elif step != self.step:
            problem = f"step is {shorten(step)}, and the checkpoint's {self.step}"
        try:
            if not problem:
                return build(cls, {name: self.metadata[name] for name in given})
        except SchemaError as error:
            problem = str(error).replace("\n", "; ")
        raise CheckpointError(
            f"the metadata of step {self.step} is not that of an mt-train run: {problem}; "
            "use a run of this version, or another step",
            file=MANIFEST,
        )

    def tensor_of(self, path: str) -> str | None:
        """Return the array to which a file belongs, if any."""
        folder = path.rpartition("/")[0]
        return folder if folder in self.arrays else None

    def encode(self) -> bytes:
        """Return the manifest file: one JSON object whose first line has the hash of the rest."""
        body = {
            "format": "mt-ckpt",
            "format_version": FORMAT_VERSION if self.folder else _WITHOUT_FOLDER,
            "versions": {
                "mt-ckpt": version("mt-ckpt"),
                "torch": torch.__version__,
                "numpy": np.__version__,
                "zarr": version("zarr"),
            },
            "step": self.step,
            **({"folder": self.folder} if self.folder else {}),
            "metadata": self.metadata,
            "arrays": {name: array_record(spec) for name, spec in self.arrays.items()},
            "files": {path: item.record() for path, item in self.files.items()},
        }
        lines = (
            f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}"
            for key, value in body.items()
        )
        rest = ",\n".join(lines).encode() + b"\n}\n"
        if problem := too_large(rest):
            raise CheckpointError(
                f"the manifest of step {self.step} {problem}. Save fewer and larger arrays, and "
                "put long metadata into an array"
            )
        return b'{"sha256": "' + hashlib.sha256(rest).hexdigest().encode() + b'",\n' + rest


def step_name(step: int) -> str:
    """Return the name of a step directory: `20` -> `step_00000020`."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step of a directory: `.../step_00000020` -> 20; None for other names."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match and step_name(int(match[1])) == path.name else None


def claimed_step(checkpoint: Path) -> int | None:
    """Return the step in a manifest, read from its first lines without verification."""
    try:
        with open_manifest(checkpoint) as file:
            head = file.read(_HEAD_BYTES)
    except (CheckpointError, OSError):
        return None  # a full read reports the problem
    match = re.search(rb'^"step": (\d{1,18}),$', head, re.MULTILINE)
    return None if match is None else int(match[1])


def other_step(checkpoint: Path, step: int | None) -> str | None:
    """Return the problem if the name of a step directory contradicts its manifest."""
    named = step_of(checkpoint)
    if step is None or named is None or named == step:
        return None
    return (
        f"has step {step}, and the directory is named {checkpoint.name}; rename it to "
        f"{step_name(step)}"
    )


def check_step(checkpoint: Path, step: int | None) -> None:
    """Raise CheckpointError if the name of a step directory contradicts its manifest."""
    if reason := other_step(checkpoint, step):
        raise _damaged(checkpoint / MANIFEST, reason)


def check_nesting(names: list[str]) -> None:
    """Raise ValueError if a name is both an array and a group."""
    for group in group_names(names):
        if group in set(names):
            raise ValueError(f"{group!r} is an array, and other arrays are below it; rename one")


def read_manifest(checkpoint: Path) -> Manifest:
    """Read and check the manifest of a step directory.

    Raises:
        CheckpointError: The manifest is missing, damaged, foreign, or newer than this mt-ckpt.
    """
    with _manifest_errors(checkpoint) as path:
        data = disk_of(path).read(checkpoint, MANIFEST, limit=MAX_BYTES)
    if problem := too_large(data):
        raise _damaged(path, problem)
    body = _parse(path, _unseal(path, data))
    try:
        found = _check_version(path, body)
        check_metadata(body.get("metadata"))
        return Manifest(
            step=typed(body, "step", int),
            folder=typed(body, "folder", str) if "folder" in body else "",
            metadata=typed(body, "metadata", dict),
            arrays={
                name: array_spec(name, value, found)
                for name, value in typed(body, "arrays", dict).items()
            },
            files={
                name: file_record(name, value, found)
                for name, value in typed(body, "files", dict).items()
            },
        )
    except (ValueError, TypeError) as error:
        raise _damaged(path, f"is not a valid manifest: {error}") from error


def open_manifest(checkpoint: Path) -> BinaryIO:
    """Open the manifest of a step directory.

    Raises:
        CheckpointError: It is missing (caused by a `MissingFileError`), or is no plain file.
    """
    with _manifest_errors(checkpoint):
        return disk_of(checkpoint).open(checkpoint, MANIFEST)[0]


@contextlib.contextmanager
def _manifest_errors(checkpoint: Path) -> Iterator[Path]:
    """Yield the path of the manifest, and turn file errors into CheckpointErrors."""
    path = checkpoint / MANIFEST
    if disk_of(path).has_folders and path.is_symlink():
        raise _damaged(path, "is a symbolic link; a checkpoint holds plain files only")
    try:
        yield path
    except MissingFileError as error:
        if not disk_of(checkpoint).is_folder(checkpoint):
            text = f"{checkpoint}: no such checkpoint directory"
            raise CheckpointError(text, file=str(checkpoint)) from error
        raise CheckpointError(
            f"{path}: missing, so {checkpoint} is not a complete checkpoint. {_ADVICE}",
            file=MANIFEST,
        ) from error
    except ObjectError as error:
        raise CheckpointError(str(error), file=MANIFEST) from error
    except FileError as error:
        raise _damaged(path, error.problem) from error


def _unseal(path: Path, data: bytes) -> bytes:
    seal = _SEAL.match(data)
    if seal is None:
        raise _damaged(path, "does not start as a manifest of mt-ckpt does")
    found = hashlib.sha256(data[seal.end() :]).hexdigest()
    if found.encode() != seal.group(1):
        raise _damaged(path, f"its content has sha256 {found}, its first line says otherwise")
    return data


def _parse(path: Path, data: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            raise ValueError("a key occurs twice")
        return value

    def refuse(text: str) -> NoReturn:
        raise ValueError(f"{text} is no JSON number")

    try:
        return json.loads(data, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"is not valid JSON: {error}") from error


def _check_version(path: Path, body: dict[str, Any]) -> int:
    """Return the format version of a manifest."""
    if body.get("format") != "mt-ckpt":
        raise ValueError(f"format is {body.get('format')!r}, not 'mt-ckpt'")
    found = typed(body, "format_version", int)
    if found < 1:
        raise ValueError(f"format_version is {found}; versions start at 1")
    if found > FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: written in format version {found} by mt-ckpt "
            f"{typed(body, 'versions', dict).get('mt-ckpt')}; this is mt-ckpt "
            f"{version('mt-ckpt')}, which reads format versions up to {FORMAT_VERSION}. "
            "Upgrade mt-ckpt",
            file=MANIFEST,
        )
    return found


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path}: {reason}. {_ADVICE}", file=MANIFEST)


def _is_needed(item: dataclasses.Field[Any]) -> bool:
    return item.default is item.default_factory is dataclasses.MISSING
