"""Databases, vectors, indexes and neighbours: damaged, forged with seals that fit, exchanged."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from drawn import named
from world import Row, World, call, demand, expect, flip_bit, replace_with

NUMBER = 100  # changes of a case
KINDS = ("fifo", "folder", "device", "secret", "link")
PATHS = (
    "",
    "\ud800",
    ".",
    "..",
    "\0",
    "../../../../etc/passwd",
    "/etc/passwd",
    "/dev/zero",
    "x" * 5000,
)
NUMBERS = (-(2**63), -2, -1, 0, 1, 2, 63, 10**6, 2**31, 2**62, 10**30, 0.5, 1e308, True)
ODD = (None, "", [], {}, "object", "float64", "int8", [1, 2], {"a": 1}, "é\ud800", "0" * 64)
Tree = dict[str, Any]


def drawn_neighbours(world: World, rng: random.Random, scratch: Path) -> None:
    """Change a file of a database or of neighbours: named, or in order where it was sealed anew."""
    kept = world.once("retrieval", _made)
    folder, other = scratch / "one", kept / "other"
    shutil.copytree(kept / "one", folder)
    paths = [path for part in ("db", "near", "vectors") for path in _files(folder / part)]
    for number in range(NUMBER):
        path, change = rng.choice(paths), rng.choice(CHANGES)
        whole = {each: each.read_bytes() for each in paths}
        is_forged = change in (_record, _array, _index)
        change(path, rng, scratch, other / path.relative_to(folder))
        is_same = all(each.is_file() and each.read_bytes() == whole[each] for each in paths)
        is_refused = named(str(folder), lambda: _use(folder))
        demand(is_refused or is_forged or is_same, f"{change.__name__} of {path} was not seen")
        if is_refused and number % 25 == 0:
            _by_command(folder, path)
        for each, content in whole.items():
            _restore(each, content)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _restore(path: Path, content: bytes) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    elif path.is_symlink() or path.is_fifo() or not path.exists():
        path.unlink(missing_ok=True)
    elif path.read_bytes() == content:
        return
    path.write_bytes(content)


def _use(folder: Path) -> None:
    """Do with the files all that training and a query do with them, and check what comes."""
    import numpy as np
    from mt_retro import Neighbours, RetroDataset, Vectors, build_database

    near = Neighbours(folder / "near")
    database = near.database
    near.verify()
    database.verify()
    Vectors(folder / "vectors").verify()
    for row in (0, 3):
        found = RetroDataset(near, sequence_length=64).row(row)
        lengths = found["neighbour_lengths"]
        demand(0 <= lengths.min() <= lengths.max() <= 2 * near.chunks.size, "lengths are wrong")
    ids, distances = database.search(np.ones((1, database.dim), np.float32), 3)
    demand(-1 <= ids.min() <= ids.max() < len(database), f"ids {ids} do not exist")
    demand(not np.isnan(distances).any(), f"distances {distances}")
    embedding = [Vectors(folder / "vectors")]
    built = folder.parent / "built"
    build_database([folder / "a"], built, chunk=8, embedding=embedding)
    shutil.rmtree(built)


def _by_command(folder: Path, path: Path) -> None:
    from mt_retro.cli import main

    part = "vectors" if path.parent.name == "vectors" else "near"
    expect(call(main, ["verify", str(folder / part)]), (0, 2))


def _spoil(path: Path, rng: random.Random, scratch: Path, other: Path) -> None:
    """Flip bits, cut, add or exchange bytes."""
    how, content = rng.randrange(5), bytearray(path.read_bytes())
    at = rng.randrange(len(content))
    if how == 0:
        flip_bit(path, rng)
        return
    if how == 1:
        del content[at:]
    elif how == 2:
        content[at:at] = rng.randbytes(rng.randrange(1, 100))
    elif how == 3:
        content[at : at + 64] = bytes(len(content[at : at + 64]))
    else:
        content = bytearray(rng.choice((b"", b"\n", b"{}", b"[" * 100_000, rng.randbytes(3000))))
    path.write_bytes(content)


def _exchange(path: Path, rng: random.Random, scratch: Path, other: Path) -> None:
    """Put the file of another build there, or another file of this one."""
    mine = rng.choice(_files(path.parents[1])) if rng.random() < 0.3 else None
    shutil.copy(mine or other, scratch / "swapped")
    shutil.copy(scratch / "swapped", path)


def _odd(path: Path, rng: random.Random, scratch: Path, other: Path) -> None:
    """Put something other than a file there, or nothing."""
    if rng.random() < 0.2:
        path.unlink()
    else:
        replace_with(path, rng.choice(KINDS), scratch)


def _record(path: Path, rng: random.Random, scratch: Path, other: Path) -> None:
    """Change values of a record, and seal it; mostly also what holds its digest."""
    path = path.parent / "record.json"
    if rng.random() < 0.01:
        _many(path, rng)
        return
    _sealed(path, rng, lambda record: [_mutate(record, rng) for _ in range(rng.choice((1, 1, 3)))])


def _mutate(record: Tree, rng: random.Random) -> None:
    """Change, remove, add or repeat one value somewhere in a tree."""
    places: list[tuple[Any, Any]] = []
    left: list[Any] = [record]
    while left:
        node = left.pop()
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in list(items):
            places.append((node, key))
            if isinstance(value, dict | list):
                left.append(value)
    if not places:
        return
    node, key = rng.choice(places)
    value, how = node[key], rng.randrange(12)
    if how == 0:
        del node[key]
    elif how == 1 and isinstance(node, dict):
        node[rng.choice(("more", "", "a" * 3000))] = rng.choice(ODD)
    elif how == 2 and isinstance(value, list):
        node[key] = value * rng.choice((0, 2, 1000))
    elif how == 3:
        node[key] = rng.choice(ODD)
    elif isinstance(value, str):
        node[key] = rng.choice((*PATHS, value[:-1], value * 2, value.swapcase()))
    elif isinstance(value, int | float):
        node[key] = rng.choice((*NUMBERS, value + 1, -value))


def _many(path: Path, rng: random.Random) -> None:
    """Give a record a million entries of a key, and its own seal."""
    from mt_retro.stored import read_sealed

    record = read_sealed(path) or {}
    key = rng.choice(sorted(record))
    del record[key]
    entries = ",".join([rng.choice(("{}", "0", '"aa"'))] * 10**6)
    text = f'{json.dumps(record)[:-1]}, "{key}": [{entries}]}}'
    path.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n")


def _array(path: Path, rng: random.Random, scratch: Path, other: Path) -> None:
    """Write an array with odd values, of another shape or dtype; its digests fit, or it lies."""
    import numpy as np
    from mt_retro.stored import ArrayWriter

    path = rng.choice(sorted(path.parents[1].rglob("*.npy")))
    values = np.load(path)
    if rng.random() < 0.7:
        odd = (-2, -(2**63), len(values) * 9, 2**62) if values.dtype.kind == "i" else None
        place = tuple(rng.randrange(size) for size in values.shape)
        values[place] = rng.choice(odd or (np.nan, np.inf, -np.inf, 3e38, 1e19, -1e-45))
    shape, dtype = values.shape, values.dtype.name
    if rng.random() < 0.4:
        rows = rng.choice((0, 1, len(values) - 1, len(values) + 1))
        values = np.resize(values, (rows, rng.choice((1, values.shape[1], values.shape[1] + 1))))
    if rng.random() < 0.3:
        dtype = rng.choice(("int64", "float32"))
    with path.open("wb") as file:
        writer = ArrayWriter(file, dtype, values.shape)
        writer.write(np.ascontiguousarray(values).tobytes())
    digests = hashlib.sha256(path.read_bytes()).hexdigest()  # of one block, as small as it is
    header = path.stat().st_size - values.nbytes
    said = {"dtype": dtype, "shape": list(values.shape), "header": header, "blocks": digests}
    if rng.random() < 0.3:
        said["shape"] = [rng.choice((shape[0], *NUMBERS)), rng.choice((shape[1], *NUMBERS))]
    _sealed(path.parent / "record.json", rng, lambda record: record.update({path.stem: said}))


def _sealed(path: Path, rng: random.Random, change: Callable[[Tree], object]) -> None:
    """Change a record and seal it; mostly seal again what holds its digest, too."""
    from mt_retro.stored import digest_of, read_sealed, write_record

    record = read_sealed(path) or {}
    change(record)
    write_record(path, record)
    folder = next(each for each in path.parents if (each / "near").is_dir())
    parts = ("vectors", "db", "near")
    for below, part in pairwise(parts):
        if part == path.parent.name or rng.random() < 0.2:
            continue
        digest = digest_of(read_sealed(folder / below / "record.json"))
        above = read_sealed(folder / part / "record.json") or {}
        if below == "vectors":
            above["sources"][0]["vectors"] = digest
        else:
            above["database"] = digest
        write_record(folder / part / "record.json", above)


def _index(path: Path, rng: random.Random, scratch: Path, other: Path) -> None:
    """Put the index of another build there, and name its digest."""
    database = path.parents[1] / "db"
    theirs = (other.parents[1] / "db" / "index.faiss").read_bytes()
    (database / "index.faiss").write_bytes(theirs)
    said = {"factory": rng.choice(("IVF2,Flat", "IVF9,Flat", "Flat", "é")), "faiss": "1"}
    said["sha256"] = hashlib.sha256(theirs).hexdigest()
    _sealed(database / "record.json", rng, lambda record: record.update(index=said))


def _made(folder: Path) -> None:
    """Make two builds: tokens, their vectors, a database with an index, and neighbours."""
    import numpy as np
    from mt_data import IndexedDataset, IndexedWriter
    from mt_retro import (
        Chunks,
        NGramEmbedding,
        Vectors,
        build_database,
        embed_chunks,
        find_neighbours,
    )

    draw = np.random.default_rng(0)
    for build in ("one", "other"):
        base = folder / build
        base.mkdir(parents=True)
        with IndexedWriter(base / "a", np.uint16) as writer:
            for _ in range(30):
                writer.add_document(draw.integers(0, 20, draw.integers(0, 90)))
        dataset, embedding = IndexedDataset(base / "a"), NGramEmbedding(8)
        embed_chunks(Chunks(dataset, 8), base / "vectors", embedding)
        vectors = [Vectors(base / "vectors")]
        database = build_database(
            [base / "a"], base / "db", chunk=8, embedding=vectors, index="IVF2,Flat"
        )
        find_neighbours(database, dataset, base / "near", embedding=vectors[0])


CHANGES = (_spoil, _spoil, _exchange, _odd, _record, _record, _array, _array, _index)
ROWS = [
    Row(
        name=f"files of neighbours drawn, {NUMBER} a case",
        attack=drawn_neighbours,
        cases=200,
        sample=1,
    ),
]
