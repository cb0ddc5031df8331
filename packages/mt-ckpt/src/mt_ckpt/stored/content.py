"""The content of a step directory, checked against its manifest as it is read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from mt_files import FileError, ObjectError

from mt_ckpt.array import ArraySpec
from mt_ckpt.digest import CRC_BYTES, Sums, crc32c, digest_of
from mt_ckpt.disk import in_threads
from mt_ckpt.error import CheckpointError, Problem
from mt_ckpt.manifest import MANIFEST, Manifest, other_step, read_manifest
from mt_ckpt.path import disk_of
from mt_ckpt.stored.chunk import BLOCK_BYTES
from mt_ckpt.value import FileRecord

_WRONG_SLICE = "its content has changed: the crc32c of a slice differs from the manifest's"
_WRONG_CRC = "its crc32c is not that of its values, so other programs would refuse it"
_WRONG_INDEX = "its index gives other places than its slices have"
_REQUESTS = 16  # number of concurrent requests to an object store, for small objects
_ADVICE = "Load another step, or restore the files from a copy."


def inventory(path: Path, manifest: Manifest) -> list[Problem]:
    """Compare the directory with the manifest."""
    found, odd = disk_of(path).files(path / manifest.folder)
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


class DamageError(CheckpointError):
    """A file of a checkpoint is damaged.

    Attributes:
        problem: The file, the array and the reason.
    """

    problem: Problem


def damage(
    path: Path, manifest: Manifest, name: str, reason: str, *, tensor: str | None = None
) -> DamageError:
    """Return the error for a damaged file, which by default belongs to the array of its folder."""
    tensor = manifest.tensor_of(name) if tensor is None else tensor
    problem = Problem(file=name, tensor=tensor, reason=reason)
    error = DamageError.from_problems(f"{path} is damaged", [problem], _ADVICE)
    error.problem = problem
    return error


@contextlib.contextmanager
def _opened(
    path: Path, manifest: Manifest, name: str, *, parts: bool = False
) -> Iterator[BinaryIO]:
    """Open a file of the recorded size, and turn every OSError into a DamageError."""
    try:
        place = f"{manifest.folder}/{name}" if manifest.folder else name
        stream, size = disk_of(path).open(path, place, parts=parts)
        with stream:
            if size != manifest.files[name].size:
                raise damage(path, manifest, name, _wrong_size(size, manifest.files[name]))
            yield stream
    except ObjectError as error:
        raise CheckpointError(str(error), file=name, tensor=manifest.tensor_of(name)) from error
    except FileError as error:
        raise damage(path, manifest, name, error.problem) from error
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
        raise damage(path, manifest, name, reason) from error


def _check(
    path: Path, manifest: Manifest, name: str, digest: str, *, tensor: str | None = None
) -> None:
    recorded = manifest.files[name].digest
    if digest != recorded:
        algorithm = recorded.partition(":")[0]
        reason = f"its content has changed: the {algorithm} differs from the manifest's"
        raise damage(path, manifest, name, reason, tensor=tensor)


def read_file(path: Path, manifest: Manifest, name: str) -> bytes:
    """Return the verified content of a document or a pack, whose size the manifest bounds.

    Raises:
        DamageError: The file differs from its record in the manifest. For a pack, the error names
            the first array with a damaged chunk.
    """
    with _opened(path, manifest, name) as stream:
        content = stream.read(manifest.files[name].size)
    digest = digest_of(content, manifest.files[name].digest.partition(":")[0])
    tensor = None
    if digest != manifest.files[name].digest:
        tensor = next(_damaged_arrays(content, manifest.packs.get(name, {})), None)
    _check(path, manifest, name, digest, tensor=tensor)
    return content


def _damaged_arrays(content: bytes, arrays: Mapping[str, ArraySpec]) -> Iterator[str]:
    """Yield the arrays of a pack with a wrong crc32c of their values."""
    data = np.frombuffer(content, np.uint8)
    for name, spec in arrays.items():
        if not _has_crc(data[spec.offset : spec.offset + spec.chunk_bytes]):
            yield name


def _has_crc(stored: np.ndarray) -> bool:
    """Return whether bytes end with the crc32c of the bytes before it."""
    return crc32c(stored[:-CRC_BYTES]).tobytes() == stored[-CRC_BYTES:].tobytes()


def check_pack(path: Path, manifest: Manifest, name: str) -> bytes:
    """Return the verified content of a pack, with the crc32c of each chunk in it checked.

    Raises:
        DamageError: See `read_file`.
    """
    content = read_file(path, manifest, name)
    if tensor := next(_damaged_arrays(content, manifest.packs[name]), None):
        raise damage(path, manifest, name, _WRONG_CRC, tensor=tensor)
    return content


def check_chunk(path: Path, manifest: Manifest, name: str, spec: ArraySpec) -> None:
    """Check a chunk's whole file: its digest, every crc32c, and the index of its slices.

    Raises:
        DamageError: The chunk differs from its record in the manifest.
    """
    content = np.frombuffer(read_file(path, manifest, name), np.uint8)
    size = content.size if spec.slices is None else spec.slice_bytes
    for number in range(max(1, spec.num_sums)):
        piece = content[number * size : (number + 1) * size]
        if not _has_crc(piece):
            raise damage(path, manifest, name, _WRONG_CRC)
        if spec.slices is not None and not _is_recorded(piece, manifest.files[name], number):
            raise damage(path, manifest, name, _WRONG_SLICE)
    if spec.slices is None:
        return
    if not _is_index(content[spec.num_slices * size :], spec):
        raise damage(path, manifest, name, _WRONG_INDEX)


def _is_recorded(piece: np.ndarray, record: FileRecord, number: int) -> bool:
    """Return whether a slice ends with its crc32c in the manifest."""
    return piece[-CRC_BYTES:].tobytes().hex() == record.sums[8 * number : 8 * number + 8]


def _is_index(end: np.ndarray, spec: ArraySpec) -> bool:
    """Return whether the bytes after the slices of a chunk are the index of the slices."""
    return end[:-CRC_BYTES].tobytes() == spec.slice_index() and _has_crc(end)


def read_chunk(path: Path, manifest: Manifest, name: str, into: np.ndarray) -> None:
    """Read the values of a chunk, and check its digest and crc32c.

    The values are in place before the check, so that they pass through memory once.

    Raises:
        DamageError: The chunk differs from its record in the manifest.

    Shape:
        into: (bytes of the chunk's values,) uint8, contiguous.
    """
    sums = Sums(manifest.files[name].digest.partition(":")[0])
    crc = np.empty(CRC_BYTES, np.uint8)
    with _opened(path, manifest, name) as stream:
        for start in range(0, into.size, BLOCK_BYTES):
            block = into[start : start + BLOCK_BYTES]
            _fill(stream, block)
            sums.add(block)
        _fill(stream, crc)
    found = sums.crc
    sums.add_stored(crc)
    _check(path, manifest, name, sums.digest)
    if not np.array_equal(crc, found):
        raise damage(path, manifest, name, _WRONG_CRC)


def read_slices(
    path: Path,
    manifest: Manifest,
    name: str,
    spec: ArraySpec,
    take: Callable[[int, np.ndarray], None],
    numbers: Sequence[int] | None = None,
) -> None:
    """Read slices of a chunk and check them.

    Args:
        path: The step directory.
        manifest: Its manifest.
        name: Path of the chunk.
        spec: Its array.
        take: Function to call with the number and the values of each slice; the next slice
            overwrites the values.
        numbers: Numbers of the slices to read, with a check of their crc32c against the manifest;
            by default all slices, with a check of digest and index too.

    Raises:
        DamageError: The chunk differs from its record in the manifest. `take` has been called with
            some values.
    """
    record = manifest.files[name]
    sums, wrong = Sums(record.digest.partition(":")[0]), ""
    memory = np.empty(spec.slice_bytes, np.uint8)
    with _opened(path, manifest, name, parts=numbers is not None) as stream:
        for number in range(spec.num_slices) if numbers is None else numbers:
            if numbers is not None:
                stream.seek(number * spec.slice_bytes)
            _fill(stream, memory)
            if not _has_crc(memory):
                wrong = wrong or _WRONG_CRC
            if not _is_recorded(memory, record, number):
                wrong = _WRONG_SLICE
            if numbers is None:
                sums.add_stored(memory)
            elif wrong:
                raise damage(path, manifest, name, _WRONG_SLICE)
            take(number, memory[:-CRC_BYTES])
        if numbers is not None:
            return
        end = np.empty(record.size - spec.num_slices * spec.slice_bytes, np.uint8)
        _fill(stream, end)
    sums.add_stored(end)
    _check(path, manifest, name, sums.digest)
    if wrong := wrong or ("" if _is_index(end, spec) else _WRONG_INDEX):
        raise damage(path, manifest, name, wrong)


def _fill(stream: BinaryIO, block: np.ndarray) -> None:
    """Read into a block; if the file is too short, the digest reveals the unfilled rest."""
    done = 0
    while done < block.size and (size := stream.readinto(block[done:].data)):  # pyright: ignore[reportAttributeAccessIssue]
        done += size
    block[done:] = 0


def open_checkpoint(path: Path) -> Manifest:
    """Read the manifest of a step directory, and check everything except the arrays' contents."""
    manifest = read_manifest(path)
    problems = inventory(path, manifest)
    if problems:
        raise CheckpointError.from_problems(f"{path} is damaged", problems, _ADVICE)
    documents = [name for name in manifest.files if name.rpartition("/")[2] == "zarr.json"]
    if disk_of(path).has_folders:
        for name in documents:
            read_file(path, manifest, name)
        return manifest
    for _ in in_threads(lambda name: read_file(path, manifest, name), documents, threads=_REQUESTS):
        pass
    return manifest
