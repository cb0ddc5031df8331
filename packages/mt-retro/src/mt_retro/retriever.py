"""Retrieval of passages for chunks of tokens outside any dataset, such as those of a prompt."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from mt_data import PADDING, DataError
from numpy.typing import ArrayLike, NDArray

from mt_retro.database import Database


class Retrieved(NamedTuple):
    """The neighbours of chunks, the nearest first.

    Attributes:
        ids: Numbers of chunks of the database; -1 for a missing neighbour.
        distances: Squared distances of the vectors, infinite for a missing neighbour.
        tokens: Tokens of each neighbour and of the next chunk of its document, with
            `mt_data.PADDING` after the end.

    Shape:
        - ids, distances: [n, k]; tokens: [n, k, 2 * chunk]
    """

    ids: NDArray[np.int64]
    distances: NDArray[np.float64]
    tokens: NDArray[np.int64]


class Retriever:
    """A function from chunks to their neighbours in a database.

    Args:
        database: The database, or its folder.
        embed: Function from chunks to vectors that made the database; by default the built-in
            one. It gets [n, chunk] tokens with `mt_data.PADDING` after the last of a chunk, and
            returns [n, dim].

    Raises:
        DataError: There is no such database, or another embedding made it.
    """

    def __init__(
        self,
        database: Database | str | os.PathLike[str],
        embed: Callable[[NDArray[np.int64]], NDArray] | None = None,
    ) -> None:
        self.database = database if isinstance(database, Database) else Database(database)
        self._embed = self.database.embedding if embed is None else embed
        name = getattr(embed, "name", None)
        if name is not None and name != self.database.record.embedding:
            text = f"has vectors of {self.database.record.embedding}, and these would be of {name}"
            raise DataError(f"{self.database.folder} {text}; use one embedding for both")

    def __call__(self, chunks: Sequence[ArrayLike] | NDArray[np.integer], k: int) -> Retrieved:
        """Return the k nearest chunks of the database.

        Args:
            chunks: The tokens of each chunk, at most `database.chunk`.
            k: Number of neighbours.

        Raises:
            DataError: A chunk is too long, or has no token.
        """
        size = self.database.chunk
        tokens = np.full((len(chunks), size), PADDING, np.int64)
        for row, chunk in zip(tokens, chunks, strict=True):
            values = np.asarray(chunk)
            if values.ndim != 1 or not 1 <= len(values) <= size:
                text = f"a chunk has the shape {values.shape}; it must have 1 to {size} tokens"
                raise DataError(text)
            row[: len(values)] = values
        ids, distances = self.database.search(np.asarray(self._embed(tokens)), k)
        return Retrieved(ids=ids, distances=distances, tokens=self.database.tokens(ids))
