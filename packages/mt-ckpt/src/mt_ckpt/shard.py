"""The local box of a global array, and the boxes that a rank's parameters are."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import cast

import torch
from mt_parallel_state import ParallelLayout, sharding_of
from torch.nn import Parameter

from mt_ckpt.dtype import dtype_name, dtype_names
from mt_ckpt.error import check_type

_COMPONENT = re.compile(r"[A-Za-z0-9_.@+=,-]{1,200}")
_RESERVED = ("zarr.json", "mt-manifest.json")


def check_name(name: str) -> None:
    """Raise ValueError unless `name` is a path that is safe on disk and legal in Zarr."""
    for part in name.split("/"):
        legal = _COMPONENT.fullmatch(part) and part.strip(".") and not part.startswith("__")
        if not legal or part in _RESERVED:
            raise ValueError(
                f"array name {name!r:.300}: part {part!r:.300} is not allowed. A name is parts "
                "joined by '/', each 1 to 200 of A-Z a-z 0-9 _ . @ + = , - and not all dots, nor "
                f"starting with '__', nor one of {', '.join(_RESERVED)}"
            )


@dataclass(frozen=True, eq=False)
class TensorShard:
    """A tensor that is a box of a global array.

    Attributes:
        name: Global name of the array, with `/` between groups: `model/layers.0.norm.weight`.
        tensor: The values of the box, on any device; loading fills it in place.
        global_shape: Shape of the whole array. Default: the tensor's own.
        offsets: Global index of the tensor's first element. Default: zeros.
        write: Whether this rank writes the box. Data held by several ranks has one writer.

    Shape:
        tensor: the box, `offsets[d] + tensor.shape[d] <= global_shape[d]` for every dim.
    """

    name: str
    tensor: torch.Tensor
    _: KW_ONLY
    global_shape: tuple[int, ...] = cast("tuple[int, ...]", None)
    offsets: tuple[int, ...] = cast("tuple[int, ...]", None)
    write: bool = True

    def __post_init__(self) -> None:
        check_type("name", self.name, str)
        check_name(self.name)
        check_type(f"{self.name}: tensor", self.tensor, torch.Tensor)
        local = tuple(self.tensor.shape)
        shape = local if self.global_shape is None else self._sizes("global_shape")
        offsets = (0,) * len(local) if self.offsets is None else self._sizes("offsets")
        object.__setattr__(self, "global_shape", shape)
        object.__setattr__(self, "offsets", offsets)
        if dtype_name(self.tensor.dtype) not in dtype_names():
            raise ValueError(
                f"{self.name}: dtype {self.tensor.dtype} cannot be stored; "
                f"use one of {', '.join(dtype_names())}"
            )
        if self.tensor.is_meta or self.tensor.is_sparse:
            kind = "on the meta device" if self.tensor.is_meta else "sparse"
            raise ValueError(f"{self.name}: the tensor is {kind}; a checkpoint needs dense values")
        fits = len(local) == len(shape) == len(offsets) and all(
            offset >= 0 and offset + size <= whole
            for offset, size, whole in zip(offsets, local, shape, strict=True)
        )
        if not fits:
            raise ValueError(
                f"{self.name}: a box of shape {local} at offsets {offsets} does not lie within "
                f"the global shape {shape}"
            )

    def _sizes(self, field: str) -> tuple[int, ...]:
        value = getattr(self, field)
        try:
            return tuple(operator.index(size) for size in value)
        except TypeError:
            raise TypeError(
                f"{self.name}: {field} must be integers, one per dim, not {value!r:.100}"
            ) from None


def _is_writer(axes: frozenset[str], coords: Mapping[str, int]) -> bool:
    """Whether the rank at `coords` is the first of those that hold the same box."""
    view = ("etp", "ep", "edp") if axes & {"etp", "ep", "edp"} else ("tp", "cp", "dp")
    return all(coords[axis] == 0 for axis in view if axis not in axes)


def param_shards(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    layout: ParallelLayout,
    rank: int,
    *,
    prefix: str,
    params: Mapping[str, torch.Tensor] | None = None,
) -> list[TensorShard]:
    """The shards of parameters, or of optimizer tensors shaped like parameters.

    Sharding is read from the record that `shard_param` left on each parameter. Of the ranks that
    hold the same box, the one with coordinate 0 on every axis that does not cut the parameter
    writes it; copies of a parameter that another pipeline stage owns are never written.

    Args:
        named_tensors: Global name and local tensor.
        layout: The layout of the ranks.
        rank: This rank.
        prefix: Group of the arrays: `model`, `optimizer/exp_avg` ...
        params: Name to parameter, where the tensors are not the parameters themselves (moments)
            and so carry no record of their own. A tensor that every rank holds whole is its own.

    Raises:
        ValueError: Nothing says how a tensor is split.
    """
    check_type("layout", layout, ParallelLayout)
    shards = []
    coords = layout.coordinates(rank)
    for name, tensor in named_tensors:
        check_type(f"{name!r}", tensor, torch.Tensor)
        record = tensor if params is None else params.get(name)
        if record is None or (params is None and not isinstance(tensor, Parameter)):
            raise ValueError(
                f"{name!r} is no parameter, so nothing says how it is split over the ranks; give "
                "params={name: its parameter, ...}, or the tensor itself if all ranks hold it whole"
            )
        sharding = sharding_of(cast("Parameter", record))
        spec = sharding.spec
        shape = spec.global_shape(tuple(tensor.shape), layout)
        shards.append(
            TensorShard(
                f"{prefix}/{name}",
                tensor,
                global_shape=shape,
                offsets=spec.offsets(shape, layout, coords),
                write=not sharding.is_copy and _is_writer(spec.axes, coords),
            )
        )
    return shards
