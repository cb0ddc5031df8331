"""Search by an index of faiss, for databases too large to compare each vector."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from mt_data import DataError, DataFileError, Permutation
from mt_files import Checks, MissingExtraError, Progress, open_file, writing
from numpy.typing import NDArray

from mt_retro.exact import Gather, ranked
from mt_retro.vectors import JoinedVectors

EXACT, AUTO = "exact", "auto"
POINTS = 39  # points for each centroid; faiss warns below
_DRAWN = 128  # sampled vectors for each centroid
_SMALL = 1 << 17  # chunks that exact search is quick enough for
_FOUND = 1 << 22  # numbers of keys that faiss returns at a time
_LISTS = re.compile(r"IVF(\d{1,9})(?!\d)")
_CODES = re.compile(r"(?<![A-Z])PQ\d+(?:x(\d{1,2}))?(?!\d)")
_READ = 1 << 20


@dataclass(frozen=True, kw_only=True)
class IndexRecord:
    """An index of faiss in a file.

    Attributes:
        factory: Factory string of the index.
        sha256: Digest of the file.
        faiss: Version of faiss that made it.
    """

    factory: str
    sha256: str
    faiss: str

    def __post_init__(self) -> None:
        Checks(self).done()


def choose_index(factory: str, count: int) -> str:
    """Return `exact` or a factory string; `auto` is exact below 131,072 chunks.

    Args:
        factory: `exact`, `auto` or a factory string of faiss.
        count: Number of chunks.

    Raises:
        DataError: There are too few chunks to train the index.
    """
    if factory == AUTO:
        lists = 1 << round(math.log2(4 * math.sqrt(max(count, 1))))
        return EXACT if count < _SMALL else f"IVF{lists},Flat"
    if factory == EXACT or (needed := POINTS * centroids_of(factory)) <= count:
        return factory
    most = 1 << max(count // POINTS, 1).bit_length() - 1
    instead = f"--index IVF{most},Flat or " if most > 1 else ""
    raise DataError(
        f"the index {factory} needs {needed} chunks to be trained, and the database has {count}; "
        f"use {instead}--index exact"
    )


def centroids_of(factory: str) -> int:
    """Return the largest number of centroids that training must find; 0 if there is no training."""
    lists = [int(number) for number in _LISTS.findall(factory)]
    codes = [1 << int(bits or 8) for bits in _CODES.findall(factory)]
    return max([*lists, *codes], default=0)


class FaissIndex:
    """An index of faiss over the vectors of a database.

    Candidates of faiss are compared again in fp64, so that distances and their order are the same
    as in exact search.

    Args:
        index: The index of faiss.
        factory: Factory string of the index.
    """

    def __init__(self, index: Any, factory: str) -> None:
        self._index, self.factory = index, factory
        if lists := _LISTS.search(factory):
            probes = max(1, math.ceil(math.sqrt(int(lists[1]))))
            space = _faiss().ParameterSpace()
            space.set_index_parameter(index, "nprobe", probes)

    @classmethod
    def trained(cls, factory: str, vectors: JoinedVectors, progress: Progress) -> FaissIndex:
        """Train an index on a sample of the vectors, and add all of them, block by block.

        Raises:
            DataError: faiss does not accept the factory string.
        """
        faiss, dim, count = _faiss(), vectors.dim, len(vectors)
        try:
            index = faiss.index_factory(dim, factory, faiss.METRIC_L2)
        except RuntimeError as error:
            text = f"{factory!r} is no factory string of faiss for {dim} dims"
            raise DataError(f"{text} ({str(error).splitlines()[0][-120:]})") from None
        drawn = min(count, _DRAWN * max(centroids_of(factory), POINTS))
        if not index.is_trained and drawn:
            shuffled = Permutation(count, "train")(np.arange(drawn))
            index.train(vectors.gather(np.sort(shuffled)))
        for start, keys in vectors.blocks():
            index.add(np.ascontiguousarray(keys))
            progress.update("adding to the index", start + len(keys), count, unit="chunks")
        return cls(index, factory)

    def write(self, path: Path) -> IndexRecord:
        """Write the index to a file."""
        faiss, digest = _faiss(), hashlib.sha256()
        with writing(path) as file:

            def put(content: bytes) -> int:
                digest.update(content)
                file.write(content)
                return len(content)

            faiss.write_index(self._index, faiss.PyCallbackIOWriter(put))
        version = str(faiss.__version__)
        return IndexRecord(factory=self.factory, sha256=digest.hexdigest(), faiss=version)

    @classmethod
    def read(cls, path: Path, record: IndexRecord, shape: tuple[int, int]) -> FaissIndex:
        """Read an index from a file, after a comparison of the file's digest.

        Args:
            path: The file.
            record: Its record.
            shape: Number of vectors, and number of dims.

        Raises:
            DataFileError: The file has another digest, or its index has another shape.
        """
        faiss = _faiss()
        with open_file(path, within=path.parent) as file:
            digest = hashlib.file_digest(cast("Any", file), "sha256").hexdigest()
            if digest != record.sha256:
                text = f"expected sha256 {record.sha256}, found {digest}"
                raise DataFileError(str(path), f"{text}; restore it, or build the database anew")
            file.seek(0)
            read: Callable[[int], bytes] = file.read
            try:
                index = faiss.read_index(faiss.PyCallbackIOReader(read, _READ))
            except RuntimeError as error:
                text = (
                    f"faiss {faiss.__version__} can't read it: {str(error).splitlines()[0][-200:]}"
                )
                raise DataFileError(str(path), text) from None
        if (index.ntotal, index.d) != shape:
            text = f"holds {index.ntotal} vectors of {index.d} dims, and the database {shape}"
            raise DataFileError(str(path), f"{text}; build the database anew")
        return cls(index, record.factory)

    def search(
        self, queries: NDArray, gather: Gather, k: int, excluded: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the k nearest keys of each query that faiss finds; see `exact_neighbours`.

        Args:
            queries: Vectors, [n, dim].
            gather: Function that returns the keys of given numbers.
            k: Number of neighbours.
            excluded: Range of keys that a query must not find, [n, 2].
        """
        total = self._index.ntotal
        ids = np.full((len(queries), k), -1, np.int64)
        distances = np.full((len(queries), k), np.inf)
        left, wanted = np.arange(len(queries)), min(total, 2 * k + 16)
        while len(left) and wanted:
            undone: list[NDArray[np.int64]] = []
            step = max(1, _FOUND // wanted)
            for rows in (left[start : start + step] for start in range(0, len(left), step)):
                found = self._candidates(queries[rows], wanted, excluded[rows])
                is_done = (found.sure >= k) | found.is_last | (wanted == total)
                undone.append(rows[~is_done])
                pairs = np.nonzero(found.is_allowed & is_done[:, None])
                numbers = found.ids[pairs]
                best = ranked(queries[rows], pairs[0], numbers, gather, k)
                ids[rows[is_done]], distances[rows[is_done]] = (part[is_done] for part in best)
            left, wanted = np.concatenate(undone), min(total, 4 * wanted)
        return ids, distances

    def _candidates(self, queries: NDArray, wanted: int, excluded: NDArray[np.int64]) -> _Found:
        near, ids = self._index.search(np.ascontiguousarray(queries, np.float32), wanted)
        allowed = (ids >= 0) & ((ids < excluded[:, :1]) | (ids >= excluded[:, 1:]))
        # faiss may leave out keys as far as the last one, so only nearer keys are sure.
        last = near[:, -1:]
        squares = np.einsum("ij,ij->i", queries, queries, dtype=np.float64)[:, None]
        margin = 1e-4 * (np.abs(last) + squares)
        sure = (allowed & (near < last - margin)).sum(axis=1)
        return _Found(ids=ids, is_allowed=allowed, sure=sure, is_last=ids[:, -1] < 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Found:
    """Candidates of faiss.

    Attributes:
        ids: Numbers of keys, [n, wanted].
        is_allowed: Whether each candidate exists and is not excluded, [n, wanted].
        sure: Number of allowed candidates surely nearer than every key that faiss left out, [n].
        is_last: Whether faiss has no further keys, [n].
    """

    ids: NDArray[np.int64]
    is_allowed: NDArray[np.bool_]
    sure: NDArray[np.int64]
    is_last: NDArray[np.bool_]


def _faiss() -> Any:
    try:
        import faiss
    except ModuleNotFoundError as error:
        text = "an index other than exact needs: pip install 'mt-retro[faiss]'"
        raise MissingExtraError(text) from error
    return faiss
