"""PartitionSpec: how one tensor is split over the axes of a layout. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from mt_files import check_type, multiples_near

from mt_parallel_state.layout import AXES, DENSE, EXPERT, ParallelLayout

DimSpec = str | tuple[str, ...] | None


@dataclass(frozen=True, init=False, repr=False)
class PartitionSpec:
    """For each tensor dim: `None` (whole), an axis name, or a tuple of axis names.

    The term is JAX's. A dim with a tuple of axes is split over their product, the first axis being
    the major one. Dims beyond the spec are whole, so `PartitionSpec()` is a replicated tensor.
    Every shard is a plain box; sizes must divide evenly.

    >>> spec = PartitionSpec(None, "tp")
    >>> spec.local_shape((2, 8), ParallelLayout(tp=4))
    (2, 2)

    Attributes:
        dims: Per tensor dim the axes that split it, trailing whole dims left out.

    Raises:
        ValueError: An axis is unknown or used twice, or axes of the dense view (tp, cp, dp) are
            mixed with axes of the expert view (etp, ep, edp).
    """

    dims: tuple[tuple[str, ...], ...]

    def __init__(self, *dims: DimSpec) -> None:
        names = [name for dim in dims for name in _names(dim)]
        for name in names:
            if name not in AXES:
                raise ValueError(f"unknown axis {name!r} in a spec; the axes are {', '.join(AXES)}")
            if names.count(name) > 1:
                raise ValueError(f"axis {name!r} appears twice in {dims!r}; one dim can have it")
        if DENSE & set(names) and EXPERT & set(names):
            raise ValueError(
                f"spec {dims!r} mixes axes of the dense view (tp, cp, dp) with axes of the expert "
                "view (etp, ep, edp); a parameter belongs to one of them"
            )
        while dims and not _names(dims[-1]):
            dims = dims[:-1]
        object.__setattr__(self, "dims", tuple(_names(dim) for dim in dims))

    @property
    def axes(self) -> frozenset[str]:
        """Return every axis that splits some dim."""
        return frozenset(name for dim in self.dims for name in dim)

    def local_shape(self, global_shape: Sequence[int], layout: ParallelLayout) -> tuple[int, ...]:
        """Return the shape of one shard.

        Raises:
            ValueError: A split dim is not a multiple of its number of shards.
        """
        local = []
        for dim, (size, axes) in enumerate(self._zip(global_shape, layout)):
            shards = _shards(axes, layout)
            if size % shards:
                raise ValueError(
                    f"dim {dim} of shape {tuple(global_shape)} has size {size}, which "
                    f"{'-'.join(axes)} = {shards} does not divide; the nearest sizes that work are "
                    f"{multiples_near(size, shards)}"
                )
            local.append(size // shards)
        return tuple(local)

    def global_shape(self, local_shape: Sequence[int], layout: ParallelLayout) -> tuple[int, ...]:
        """Return the shape of the whole tensor, given the shape of one shard."""
        return tuple(size * _shards(axes, layout) for size, axes in self._zip(local_shape, layout))

    def offsets(
        self, global_shape: Sequence[int], layout: ParallelLayout, coords: Mapping[str, int]
    ) -> tuple[int, ...]:
        """Return where the shard at `coords` (of `layout.coordinates(rank)`) starts in each dim."""
        local = self.local_shape(global_shape, layout)
        missing = self.axes - set(coords)
        if missing:
            raise ValueError(f"coords {dict(coords)} lack {', '.join(sorted(missing))} of {self!r}")
        result = []
        for size, (_, axes) in zip(local, self._zip(global_shape, layout), strict=True):
            index = 0
            for axis in axes:
                index = index * layout.size(axis) + coords[axis]
            result.append(index * size)
        return tuple(result)

    def _zip(
        self, shape: Sequence[int], layout: ParallelLayout
    ) -> list[tuple[int, tuple[str, ...]]]:
        check_type("layout", layout, ParallelLayout)
        if len(self.dims) > len(shape):
            raise ValueError(
                f"{self!r} splits dim {len(self.dims) - 1}, but the tensor of shape "
                f"{tuple(shape)} has {len(shape)} dims"
            )
        padded = self.dims + ((),) * (len(shape) - len(self.dims))
        return list(zip((int(size) for size in shape), padded, strict=True))

    def __repr__(self) -> str:
        dims = (repr(dim[0] if len(dim) == 1 else dim) if dim else "None" for dim in self.dims)
        return f"PartitionSpec({', '.join(dims)})"


def _names(dim: DimSpec) -> tuple[str, ...]:
    if dim is None:
        return ()
    return (dim,) if isinstance(dim, str) else tuple(dim)


def _shards(axes: tuple[str, ...], layout: ParallelLayout) -> int:
    return prod(layout.size(axis) for axis in axes)
