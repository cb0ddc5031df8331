"""The vectors of a dataset's chunks, as a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from mt_data import DataError, DataFileError, Part
from mt_files import Progress
from numpy.typing import NDArray

from mt_retro.chunks import Chunks, ChunksRecord
from mt_retro.exact import BLOCK, check_vectors
from mt_retro.stored import (
    ArrayRecord,
    StoredArray,
    blocks_of,
    digest_of,
    path_in,
    read_record,
)
from mt_retro.work import Work

_FILE = "vectors.npy"


class NamedEmbedding(Protocol):
    """A function from chunks to vectors, with a name that identifies the vectors it makes.

    Shape:
        - [n, m] tokens, with `mt_data.PADDING` after the last of a chunk; [n, dim] float32
    """

    @property
    def name(self) -> str: ...  # noqa: D102 - the class describes them
    @property
    def dim(self) -> int: ...  # noqa: D102
    def __call__(self, chunks: NDArray[np.int64], /) -> NDArray: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class VectorsRecord(ChunksRecord):
    """A description of a folder of vectors.

    Attributes:
        kind: Kind of the folder.
        embedding: Name of the embedding.
        vectors: The array.
    """

    kind: Literal["vectors"]
    embedding: str
    vectors: ArrayRecord

    def __post_init__(self) -> None:
        self._checks("vectors", self.vectors, "float32").done()


class Vectors:
    """The vectors of a dataset's chunks.

    Args:
        folder: A folder that `embed_chunks` made.

    Attributes:
        record: The description in the folder.
        digest: Digest of the vectors, the dataset and the embedding.

    Raises:
        DataError: There are no vectors in the folder, or their files are damaged.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.record = read_record(self.folder, VectorsRecord, "vectors")
        self.digest = digest_of(self.record)
        self.array = StoredArray(self.folder / _FILE, self.record.vectors)

    def __len__(self) -> int:
        return len(self.array)

    @property
    def dim(self) -> int:
        """Number of values in a vector."""
        return self.record.vectors.shape[1]

    @property
    def data_path(self) -> str:
        """Path of the dataset."""
        return path_in(self.folder, self.record.data_path)

    def verify(self) -> None:
        """Read all vectors, and refuse damage and values that are not finite.

        Raises:
            DataFileError: The vectors are damaged or not finite; the message names the file.
        """
        self.array.verify()
        try:
            for start, vectors in blocks_of(self.array, BLOCK):
                check_vectors("vectors", vectors, start)
        except DataFileError:
            raise
        except DataError as error:
            raise DataFileError(str(self.array.path), str(error)) from None


class JoinedVectors:
    """The vectors of several datasets, numbered through all of them.

    Args:
        parts: The vectors of each dataset, of one embedding.

    Attributes:
        first: Number of the first vector of each part, and the total.
    """

    def __init__(self, parts: Sequence[Vectors]) -> None:
        self.parts = parts
        self.first = list(accumulate(map(len, parts), initial=0))

    def __len__(self) -> int:
        return self.first[-1]

    @property
    def dim(self) -> int:
        """Number of values in a vector."""
        return self.parts[0].dim

    def gather(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the vectors of these numbers: [n] gives [n, dim]."""
        found = np.empty((len(ids), self.dim), np.float32)
        for part, first in zip(self.parts, self.first, strict=False):
            is_mine = (ids >= first) & (ids < first + len(part))
            found[is_mine] = part.array.gather(ids[is_mine] - first)
        return found

    def blocks(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield all vectors in blocks, each with the number of its first vector."""
        for part, first in zip(self.parts, self.first, strict=False):
            for start, block in blocks_of(part.array, BLOCK):
                yield first + start, block


def embed_chunks(
    chunks: Chunks,
    out: str | os.PathLike[str],
    embedding: NamedEmbedding,
    *,
    part: Part | None = None,
    progress: Progress | None = None,
) -> bool:
    """Write the vectors of a dataset's chunks to a folder.

    The results of an earlier call with the same arguments are kept. The parts may be made by
    several processes that share the file system.

    Args:
        chunks: The chunks of the dataset.
        out: The folder.
        embedding: Function from chunks to vectors, with a name that identifies the vectors.
        part: Share of the chunks to embed; by default all of them.
        progress: Where to show the progress.

    Returns:
        Whether all vectors exist.

    Raises:
        DataError: The folder holds something else, or a vector is not finite.
    """
    folder = Path(out)
    plan = {**chunks.plan("vectors", folder), "embedding": embedding.name}
    shape = (len(chunks), embedding.dim)
    work = Work(folder=folder, name=_FILE, plan=plan, shape=shape, dtype="float32")

    def make(start: int, stop: int) -> NDArray:
        vectors = np.asarray(embedding(chunks.tokens(np.arange(start, stop))))
        check_vectors(embedding.name, vectors, start)
        return vectors

    def record_of(array: ArrayRecord) -> object:
        return plan | {"vectors": array}

    return work.run(make, record_of, part=part, progress=progress)
