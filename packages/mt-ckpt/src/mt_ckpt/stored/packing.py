"""Packs: stored objects that many small arrays share, each a zip that holds a Zarr group.

A file costs far more than a small array's bytes, so a checkpoint of many small arrays puts them
into uncompressed zips, which zarr-python (`ZipStore`) and tensorstore read as they are.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mt_ckpt.array import PACKS, ArraySpec, chunk_file
from mt_ckpt.grid import Box
from mt_ckpt.metadata import zarr_documents

SMALL_BYTES = 2**18
PACK_BYTES = 2**25
MIN_ARRAYS = 256
PACK_NODES = 20_000  # arrays and groups; a zip has room for 65,535 entries
_COMMON = struct.Struct("<HHHHHIIIHH")  # common fields of an entry's two headers
_PLACE = struct.Struct("<HHHII")  # comment, disk, and attributes of an entry, and its offset
_END = struct.Struct("<4sHHHHIIH")
_LOCAL_BYTES = 4 + _COMMON.size


@dataclass(frozen=True, kw_only=True)
class Pack:
    """A pack, the rank that writes it, and the boxes of its arrays.

    Attributes:
        file: Path of the pack.
        rank: The rank that writes it.
        boxes: The boxes of each array, by name.
    """

    file: str
    rank: int
    boxes: dict[str, list[Box]]


def small_arrays(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the arrays for packs; none if there are only few, which become files.

    Args:
        sizes: Size in bytes of every array of the save, by name.
    """
    small = {name: size for name, size in sizes.items() if 0 < size <= SMALL_BYTES}
    return small if len(small) > MIN_ARRAYS else {}


def plan_packs(
    small: Mapping[str, int], ranks: Mapping[str, int], boxes: Mapping[str, Sequence[Box]]
) -> list[Pack]:
    """Return the packs of a save.

    No pack mixes arrays of two top-level groups, so that weights can be read without the
    optimizer's state.

    Args:
        small: Size in bytes of each array, by name.
        ranks: The rank that writes each array.
        boxes: The boxes of each array, with the ranks that give them.
    """
    by_rank: dict[tuple[int, str], list[str]] = {}
    for name in small:
        by_rank.setdefault((ranks[name], name[: name.find("/") + 1]), []).append(name)
    packs: list[Pack] = []
    for (rank, _), names in sorted(by_rank.items()):
        room = nodes = 0
        for name in sorted(names):
            size, depth = small[name], name.count("/") + 1
            room, nodes = room - size, nodes + depth
            if room < 0 or nodes > PACK_NODES:
                packs.append(Pack(file=f"{PACKS}/{len(packs):05d}.zip", rank=rank, boxes={}))
                room, nodes = PACK_BYTES - size, depth
            packs[-1].boxes[name] = [box for box in boxes[name] if math.prod(box.shape)]
    return packs


def pack_bytes(
    arrays: Mapping[str, ArraySpec], chunks: Mapping[str, np.ndarray], *, step: int
) -> tuple[bytes, dict[str, int]]:
    """Return the content of a pack, and the offset of each array's chunk in it.

    Args:
        arrays: The arrays of the pack.
        chunks: The content of each array's one chunk.
        step: Training step.
    """
    entries = list(zarr_documents(arrays, step=step).items())
    entries += [(_chunk_of(name, spec), chunks[name].tobytes()) for name, spec in arrays.items()]
    content, starts = _zip_bytes(entries)
    return content, {name: starts[_chunk_of(name, spec)] for name, spec in arrays.items()}


def _zip_bytes(entries: list[tuple[str, bytes]]) -> tuple[bytes, dict[str, int]]:
    """Return an uncompressed zip, and the offset of each entry's content in it.

    `zipfile` takes ten times as long for many small entries. Equal entries make equal zips: all
    have the date of 1980-01-01 at midnight.
    """
    parts: list[bytes] = []
    directory: list[bytes] = []
    starts: dict[str, int] = {}
    position = 0
    for path, content in entries:
        name, size = path.encode(), len(content)
        # Version 2.0, no flags, stored; time, date, crc32, both sizes, lengths of name and extra.
        common = _COMMON.pack(20, 0, 0, 0, 33, zlib.crc32(content), size, size, len(name), 0)
        parts += (b"PK\3\4", common, name, content)
        directory += (b"PK\1\2\x14\3", common, _PLACE.pack(0, 0, 0, 0o100644 << 16, position), name)
        starts[path] = position + _LOCAL_BYTES + len(name)
        position = starts[path] + size
    central = b"".join(directory)
    count = len(entries)
    end = _END.pack(b"PK\5\6", 0, 0, count, count, len(central), position, 0)
    return b"".join([*parts, central, end]), starts


def _chunk_of(name: str, spec: ArraySpec) -> str:
    return chunk_file(name, (0,) * len(spec.shape))


def read_zip(
    content: bytes, arrays: Mapping[str, ArraySpec], *, step: int
) -> tuple[dict[str, bytes], str]:
    """Return the Zarr documents in a pack as other programs find them, and a problem if any.

    Args:
        content: The content of the pack.
        arrays: The arrays of the pack according to the manifest.
        step: Training step.
    """
    chunks = {_chunk_of(name, spec): spec for name, spec in arrays.items()}
    expected = {*zarr_documents(arrays, step=step), *chunks}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as pack:
            found = pack.namelist()
            if len(found) != len(expected) or set(found) != expected:
                odd = sorted(expected ^ set(found)) or ["an entry that occurs twice"]
                return {}, f"{odd[0]:.300}: either the zip or the manifest lacks it"
            for info in pack.infolist():
                if info.compress_type != zipfile.ZIP_STORED or info.file_size > len(content):
                    return {}, f"{info.filename}: is compressed, or larger than the pack"
            entries = {name: pack.read(name) for name in found}
    # zipfile has an error of its own for each way in which a zip can be odd.
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError) as error:
        return {}, f"other programs can't read its zip: {error}"
    for path, spec in chunks.items():
        if entries.pop(path) != content[spec.offset : spec.offset + spec.chunk_bytes]:
            return {}, f"{path}: the zip has other values than the manifest's offset"
    return entries, ""
