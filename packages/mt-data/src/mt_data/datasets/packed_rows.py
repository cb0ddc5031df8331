"""Rows of several whole items each, such as conversations or pairs."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from mt_data.datasets.identity import digest_of
from mt_data.datasets.packing import PackedOrder
from mt_data.datasets.row_dataset import RowDataset
from mt_data.error import one_of

RowPacking: TypeAlias = Literal["best-fit", "none"]


class PackedRows(RowDataset):
    """Rows of whole items; a subclass writes the items into a row.

    With `packing="best-fit"` the items of an epoch are shuffled and taken in windows, whose items
    fill rows by best fit. The rows of a window follow from seed, epoch and window alone. With
    `"none"` a row is one item.

    Attributes:
        window: Number of items to pack together.
    """

    window: ClassVar[int] = 4096

    def _pack(
        self,
        lengths: ArrayLike,
        size: int,
        *,
        packing: RowPacking,
        seed: int,
        name: str,
        identity: Mapping[str, object],
    ) -> None:
        """Arrange items in rows.

        Args:
            lengths: Length of each item, 1 to `size`.
            size: Room of a row.
            packing: Packing of items into rows.
            seed: Seed of the order.
            name: Name of the items; the order depends on it too.
            identity: Everything else that decides the rows, as JSON values.

        Raises:
            DataError: There is no such packing.
        """
        one_of(RowPacking, packing=packing)
        room = size if packing == "best-fit" else None
        how = {"window": self.window, "seed": operator.index(seed)}
        self._order = PackedOrder(np.asarray(lengths), room, **how, name=name)
        self._identity: dict[str, object] = {**identity, "packing": packing, **how}

    @property
    def fingerprint(self) -> str:
        """Digest of the data and of everything that decides rows and their order."""
        return digest_of(self._identity)

    def __len__(self) -> int:
        """Return the number of rows of the first epoch; another may have a few more or less."""
        return len(self._order)

    def items(self, index: int) -> list[int]:
        """Return the numbers of the items of row `index`, in the endless stream of epochs."""
        return self._order.items(index)
