"""Exact search for the nearest vectors, by products of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from mt_data import DataError
from numpy.typing import ArrayLike, NDArray

BLOCK, SLAB = 8192, 1024  # keys and queries of one product
_PAIRS = 1 << 14  # distances in fp64 at a time
_MOST = np.finfo(np.float32).max
_LARGEST = 1e38  # squared length
_FEW = 64  # largest number of queries for which finding equal keys takes longer than it saves

Blocks = Callable[[], Iterable[tuple[int, NDArray]]]
Gather = Callable[[NDArray[np.int64]], NDArray]


def exact_neighbours(
    queries: ArrayLike, keys: ArrayLike, k: int, *, excluded: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the k nearest keys of each query, the nearest first; equal distances by number.

    Distances are squared Euclidean, computed in fp64. The products of blocks that select the
    candidates are in fp32; a bound of their rounding keeps every key that might be among the k
    nearest. So the result depends neither on the blocks nor on the library of the products.

    Args:
        queries: Vectors to find neighbours of.
        keys: Vectors to search.
        k: Number of neighbours.
        excluded: Range of keys that a query must not find, for each query.

    Returns:
        Numbers of the keys and their distances. With fewer than k keys the rest is -1 and infinite.

    Raises:
        DataError: The shapes don't fit, or a vector has a value that is not finite, or is longer
            than 1e19.

    Shape:
        - queries: [n, dim]; keys: [m, dim]; excluded: [n, 2], first key and first key after
        - result: [n, k] int64, [n, k] float64
    """
    queries, keys = _matrix("queries", queries), _matrix("keys", keys)
    if queries.shape[1] != keys.shape[1]:
        text = f"queries have {queries.shape[1]} dims, and keys {keys.shape[1]}"
        raise DataError(f"{text}; take both from one embedding")

    def blocks() -> Iterable[tuple[int, NDArray]]:
        for start in range(0, len(keys), BLOCK):
            yield start, keys[start : start + BLOCK]

    return nearest(queries, blocks, lambda ids: keys[ids], k, excluded=excluded)


def nearest(
    queries: NDArray,
    blocks: Blocks,
    gather: Gather,
    k: int,
    *,
    excluded: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Search keys that come in blocks; see `exact_neighbours`.

    Args:
        queries: Vectors to find neighbours of, [n, dim].
        blocks: Function that yields the keys in order, each block with the number of its first.
        gather: Function that returns the keys of given numbers.
        k: Number of neighbours.
        excluded: Range of keys that a query must not find, [n, 2].
    """
    if k < 1:
        raise DataError(f"k is {k}; ask for 1 neighbour or more")
    check_vectors("queries", queries)
    if excluded is None:
        excluded = np.zeros((len(queries), 2), np.int64)
    slabs = [
        _Slab(queries[start : start + SLAB], excluded[start : start + SLAB], k)
        for start in range(0, len(queries), SLAB)
    ]
    for start, keys in blocks():
        block = _Block.of(start, keys, joins=len(queries) > _FEW)
        for slab in slabs:
            slab.take(block)
    found = [slab.result(gather) for slab in slabs]
    ids = np.concatenate([np.empty((0, k), np.int64), *(ids for ids, _ in found)])
    return ids, np.concatenate([np.empty((0, k)), *(distances for _, distances in found)])


def check_vectors(name: str, vectors: NDArray, first: int = 0) -> NDArray[np.float32]:
    """Return the squared lengths of vectors, and refuse values that are not finite.

    Args:
        name: Name of the vectors in the message.
        vectors: Vectors, [n, dim].
        first: Number of the first one in the message.

    Raises:
        DataError: A value is not finite, or a vector is longer than 1e19.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        low = vectors.astype(np.float32, copy=False)
        squares = np.einsum("ij,ij->i", low, low)
    is_fine = squares <= _LARGEST  # False for NaN too
    if not is_fine.all():
        row = int(is_fine.argmin())
        raise DataError(
            f"{name}: vector {first + row} has a value that is not finite, or is longer than 1e19; "
            "embed it anew"
        )
    return squares


def distances_of(queries: NDArray, keys: NDArray) -> NDArray[np.float64]:
    """Return the squared distances of pairs of vectors, in fp64: [n, dim] and [n, dim] give [n]."""
    steps = queries.astype(np.float64) - keys
    return (steps * steps).sum(axis=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Block:
    """A block of keys; products are computed once for equal keys, or once for each key.

    Attributes:
        start: Number of the first key.
        keys: The distinct keys, [distinct, dim] float32.
        squares: Their squared lengths, [distinct].
        members: Numbers of all keys, grouped by distinct key, [size].
        ends: End in `members` of the group of each distinct key, [distinct].
        order: For each member, its number plus `size` times the number of its distinct key, [size].
    """

    start: int
    keys: NDArray[np.float32]
    squares: NDArray[np.float32]
    members: NDArray[np.int64]
    ends: NDArray[np.int64]
    order: NDArray[np.int64]

    @classmethod
    def of(cls, start: int, keys: NDArray, *, joins: bool) -> _Block:
        squares = check_vectors("keys", keys, start)
        keys = np.ascontiguousarray(keys)
        with np.errstate(over="ignore"):
            low = keys.astype(np.float32, copy=False)
        kinds = _equal_rows(keys) if joins else np.arange(len(keys))
        members = np.argsort(kinds, kind="stable")
        ends = np.cumsum(np.bincount(kinds))
        if len(ends) < len(keys):
            first = members[ends - np.diff(ends, prepend=0)]
            low, squares = low[first], squares[first]
        order = kinds[members] * len(keys) + members
        return cls(start=start, keys=low, squares=squares, members=members, ends=ends, order=order)

    def without(self, low: int, high: int) -> NDArray[np.bool_] | slice:
        """Return which distinct keys have all their members in a range of the block."""
        if len(self.keys) == len(self.members):
            return slice(low, high)
        is_out = (self.members >= low) & (self.members < high)
        counts = np.diff(np.append(0, np.cumsum(is_out))[np.append(0, self.ends)])
        return counts == np.diff(self.ends, prepend=0)

    def expanded(
        self, rows: NDArray, columns: NDArray, k: int, excluded: NDArray[np.int64]
    ) -> tuple[NDArray, NDArray, NDArray]:
        """Replace each pair of a query and a distinct key by pairs with its first k members.

        Returns:
            The queries, the keys as numbers in the block, and the original pair of each new pair.
        """
        if len(self.keys) == len(self.members):
            return rows, columns, np.arange(len(rows))
        begins = self.ends[columns] - np.diff(self.ends, prepend=0)[columns]
        # The members in the excluded range are adjacent in the list, from left to right.
        low, high = np.clip(excluded[rows].T - self.start, 0, len(self.members))
        left = np.searchsorted(self.order, columns * len(self.members) + low)
        right = np.searchsorted(self.order, columns * len(self.members) + high)
        counts = np.minimum(self.ends[columns] - begins - (right - left), k)
        pair = np.repeat(np.arange(len(rows)), counts)
        rank = np.arange(len(pair)) - np.repeat(np.cumsum(counts) - counts, counts)
        place = begins[pair] + rank
        place += np.where(place >= left[pair], (right - left)[pair], 0)
        return rows[pair], self.members[place], pair


def _equal_rows(keys: NDArray) -> NDArray[np.int64]:
    """Return the number of the distinct row that each row equals; its own number if all differ."""
    bits = keys.view(np.uint32 if keys.itemsize % 4 == 0 else np.uint8)
    odd = (np.arange(bits.shape[1], dtype=np.uint32) * np.uint32(0x9E3779B1)) | np.uint32(1)
    hashes = np.einsum("ij,j->i", bits.astype(np.uint32, copy=False), odd)
    found, first, kinds = np.unique(hashes, return_index=True, return_inverse=True)
    if len(found) == len(keys):
        return np.arange(len(keys))
    if (bits != bits[first[kinds]]).any():  # two different rows have the same hash
        rows = bits.view(np.dtype((np.void, bits.shape[1] * bits.itemsize))).ravel()
        kinds = np.unique(rows, return_inverse=True)[1]
    return kinds.reshape(-1)


@dataclass(kw_only=True, eq=False)
class _Candidates:
    """Pairs of a query and a key that may be among its nearest, with bounds of their distances."""

    rows: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    lower: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    upper: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))


class _Slab:
    """A slab of queries with the best keys so far; bounds leave out the query's squared length."""

    def __init__(self, queries: NDArray, excluded: NDArray[np.int64], k: int) -> None:
        self._queries, self._excluded, self._k = queries, excluded, k
        low = queries.astype(np.float32, copy=False)
        self._doubled = -2 * low
        self._lengths = np.sqrt(np.einsum("ij,ij->i", low, low, dtype=np.float64))
        self._limit = np.full(len(queries), np.inf)  # the k-th smallest upper bound
        self._found = _Candidates()

    def take(self, block: _Block) -> None:
        """Compare the queries with a block of keys."""
        size, k = len(block.keys), self._k
        values = self._doubled @ block.keys.T
        values += block.squares
        low, high = (self._excluded - block.start).T
        for row in np.flatnonzero((low < len(block.members)) & (high > np.maximum(low, 0))):
            values[row, block.without(max(int(low[row]), 0), int(high[row]))] = np.inf
        slack = self._slack(block)
        new = np.flatnonzero(np.isinf(self._limit))
        if len(new) and size >= k:
            kth = np.partition(values[new], k - 1, axis=1)[:, k - 1]
            self._limit[new] = kth + slack[new]
        bound = np.minimum(self._limit + slack, _MOST).astype(np.float32)
        rows, columns = np.nonzero(values <= bound[:, None])
        near = values[rows, columns]
        rows, columns, pair = block.expanded(rows, columns, k, self._excluded)
        self._keep(rows, columns + block.start, near[pair], slack[rows])

    def _slack(self, block: _Block) -> NDArray[np.float64]:
        """Return a bound of the rounding of this block's values, for each query.

        A product of d terms in any order is off by at most d * 2**-24 of the lengths' product; this
        is twice as much, for the conversion to fp32 and the sums.
        """
        longest = np.sqrt(float(block.squares.max(initial=0)))
        share = (block.keys.shape[1] + 16) * 2.0**-23
        return share * (2 * self._lengths * longest + longest * longest) + 2.0**-100

    def _keep(self, rows: NDArray, ids: NDArray, near: NDArray, slack: NDArray[np.float64]) -> None:
        """Add candidates, and drop each candidate that is surely farther than k others."""
        old, k = self._found, self._k
        rows = np.concatenate([old.rows, rows])
        ids = np.concatenate([old.ids, ids])
        lower = np.concatenate([old.lower, near - slack])
        upper = np.concatenate([old.upper, near + slack])
        order = np.lexsort((upper, rows))
        ends = np.searchsorted(rows[order], np.arange(len(self._limit)), side="right")
        counts = np.diff(ends, prepend=0)
        has_k = counts >= k
        kth = (ends - counts + k - 1)[has_k]
        self._limit[has_k] = np.minimum(self._limit[has_k], upper[order][kth])
        kept = order[lower[order] <= self._limit[rows[order]]]
        self._found = _Candidates(
            rows=rows[kept], ids=ids[kept], lower=lower[kept], upper=upper[kept]
        )

    def result(self, gather: Gather) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the nearest of the candidates by their distances in fp64."""
        rows, ids = self._found.rows, self._found.ids
        return ranked(self._queries, rows, ids, gather, self._k)


def ranked(
    queries: NDArray, rows: NDArray[np.int64], ids: NDArray[np.int64], gather: Gather, k: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the k nearest of given pairs of queries and keys; see `exact_neighbours`.

    Args:
        queries: Vectors, [n, dim].
        rows: Query of each pair.
        ids: Key of each pair.
        gather: Function that returns the keys of given numbers.
        k: Number of neighbours.
    """
    parts = [np.empty(0)]
    for start in range(0, len(rows), _PAIRS):
        part = slice(start, start + _PAIRS)
        parts.append(distances_of(queries[rows[part]], gather(ids[part])))
    distances = np.concatenate(parts)
    order = np.lexsort((ids, distances, rows))
    rows, ids, distances = rows[order], ids[order], distances[order]
    begins = np.searchsorted(rows, np.arange(len(queries)))
    rank = np.arange(len(rows)) - begins[rows]
    near = rank < k
    found = np.full((len(queries), k), -1, np.int64)
    far = np.full((len(queries), k), np.inf)
    found[rows[near], rank[near]] = ids[near]
    far[rows[near], rank[near]] = distances[near]
    return found, far


def _matrix(name: str, value: ArrayLike) -> NDArray:
    array = np.asarray(value)
    if array.ndim != 2:
        raise DataError(f"{name} have the shape {array.shape}; they must be [vectors, dims]")
    if array.dtype.kind != "f":
        array = array.astype(np.float64)
    return array
