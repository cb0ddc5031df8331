"""Shards: boxes of global arrays, and the shards of a rank's parameters."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import cast

import torch
from mt_files import check_type
from mt_parallel_state import ParallelLayout, is_owner, sharding_of
from torch.nn import Parameter

from mt_ckpt.dtype import dtype_name, dtype_names
from mt_ckpt.grid import Box

_COMPONENT = re.compile(r"[A-Za-z0-9_.@+=,-]{1,200}")
_RESERVED = ("zarr.json", "mt-manifest.json")


def check_name(name: str) -> None:
    """Raise ValueError unless `name` is a safe path on disk and legal in Zarr."""
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
    """A box of a global array, held as a tensor.

    Attributes:
        name: Global name of the array, with `/` between groups: `model/layers.0.norm.weight`.
        tensor: The values of the box, on any device; loading fills it in place.
        global_shape: Shape of the whole array. Default: the tensor's own.
        offsets: Global index of the tensor's first element. Default: zeros.
        write: Whether this rank writes the box. Data on several ranks needs exactly one writer.
        replica: Whether the tensor equals the same box of another rank with `write=True`, value for
            value. Either of them may then write it, so that all write about as much.

    Shape:
        tensor: the box, `offsets[d] + tensor.shape[d] <= global_shape[d]` for every dim.
    """

    name: str
    tensor: torch.Tensor
    _: KW_ONLY
    global_shape: tuple[int, ...] = cast("tuple[int, ...]", None)
    offsets: tuple[int, ...] = cast("tuple[int, ...]", None)
    write: bool = True
    replica: bool = False

    def __post_init__(self) -> None:
        check_type("name", self.name, str)
        check_name(self.name)
        check_type(f"{self.name}: tensor", self.tensor, torch.Tensor)
        self._check_dense()  # before the shape, which a nested tensor does not have
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
        fits = len(local) == len(shape) == len(offsets) and all(
            offset >= 0 and offset + size <= whole
            for offset, size, whole in zip(offsets, local, shape, strict=True)
        )
        if not fits:
            raise ValueError(
                f"{self.name}: a box of shape {local} at offsets {offsets} does not lie within "
                f"the global shape {shape}"
            )

    def _check_dense(self) -> None:
        kind = ""
        if self.tensor.is_nested:
            kind = "nested; save its parts, or torch.nested.to_padded_tensor of it"
        elif self.tensor.layout != torch.strided:
            name = str(self.tensor.layout).removeprefix("torch.").lstrip("_")
            kind = f"of the layout {name}; save its to_dense()"
        elif self.tensor.is_meta:
            kind = "on the meta device, where it has no values; give it a device"
        if kind:
            raise ValueError(
                f"{self.name}: a checkpoint needs dense values, and the tensor is {kind}"
            )

    def _sizes(self, field: str) -> tuple[int, ...]:
        value = getattr(self, field)
        try:
            return tuple(operator.index(size) for size in value)
        except TypeError:
            raise TypeError(
                f"{self.name}: {field} must be integers, one per dim, not {value!r:.100}"
            ) from None


def range_boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Cut a range of a flattened (row-major) array into boxes of the array.

    A sharded optimizer holds ranges, and a checkpoint holds boxes. The boxes are in the order of
    the range, so each one is a slice of it, viewed in the box's shape.

    Args:
        shape: Shape of the array.
        start: Index of the first element.
        end: One past the last element.

    Returns:
        At most `2 * len(shape) - 1` boxes.

    Raises:
        ValueError: The range does not lie within the array.

    Example:
        >>> [str(box) for box in range_boxes((4, 3), 2, 10)]
        ['[0:1, 2:3]', '[1:3, 0:3]', '[3:4, 0:1]']
    """
    sizes = tuple(operator.index(size) for size in shape)
    if not 0 <= start <= end <= math.prod(sizes):
        raise ValueError(f"the range {start}:{end} does not lie within shape {sizes}")
    if start == end:
        return []
    if not sizes:
        return [Box(offsets=(), shape=())]
    inner = math.prod(sizes[1:])
    first, last = -(-start // inner), end // inner
    if first > last:  # within one row
        return _in_row(last, sizes, start - last * inner, end - last * inner)
    boxes = []
    if start < first * inner:
        boxes += _in_row(first - 1, sizes, start - (first - 1) * inner, inner)
    if first < last:
        zeros = (0,) * len(sizes[1:])
        boxes.append(Box(offsets=(first, *zeros), shape=(last - first, *sizes[1:])))
    if last * inner < end:
        boxes += _in_row(last, sizes, 0, end - last * inner)
    return boxes


def _in_row(row: int, shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    return [
        Box(offsets=(row, *box.offsets), shape=(1, *box.shape))
        for box in range_boxes(shape[1:], start, end)
    ]


def param_shards(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    layout: ParallelLayout,
    rank: int,
    *,
    prefix: str,
    params: Mapping[str, torch.Tensor] | None = None,
    ranges: Mapping[str, tuple[int, int]] | None = None,
    peers: Mapping[str, Sequence[int]] | None = None,
) -> list[TensorShard]:
    """Return the shards of parameters, or of optimizer tensors shaped like parameters.

    The sharding comes from the record that `shard_param` left on each parameter. Of the ranks with
    the same box one has `write` (`mt_parallel_state.is_owner`), and the others are its replicas;
    copies of a parameter that another pipeline stage owns are never written.

    Args:
        named_tensors: Pairs of global name and local tensor.
        layout: Layout of the ranks.
        rank: This rank.
        prefix: Group of the arrays, such as `model` or `optimizer/exp_avg`.
        params: Parameters by name, for tensors without a record of their own, such as moments. A
            tensor that every rank holds whole may stand for itself.
        ranges: Start and end by name, for tensors that hold a range of the flattened (row-major)
            parameter, as in a sharded optimizer; one shard for each box of the range.
            Ranges can be loaded only. To save, gather the parts of a tensor on one of `peers`
            first, because ranges end anywhere and Zarr's chunks don't.
        peers: Ranks that share a parameter's ranges, by name. This rank then writes the given
            tensor, whichever of them it is.

    Raises:
        ValueError: A tensor has no sharding record.
    """
    check_type("layout", layout, ParallelLayout)
    shards: list[TensorShard] = []
    coords = layout.coordinates(rank)
    for name, tensor in named_tensors:
        check_type(f"{name!r}", tensor, torch.Tensor)
        record = tensor if params is None else params.get(name)
        if record is None or (params is None and not isinstance(tensor, Parameter)):
            raise ValueError(
                f"{name!r} is no parameter, so its split over the ranks is unknown; pass "
                "params={name: its parameter, ...}, or the tensor itself if all ranks hold it whole"
            )
        sharding = sharding_of(cast("Parameter", record))
        others = () if peers is None else peers.get(name, ())
        write = is_owner(sharding, layout, rank, peers=others)
        replica = not (write or sharding.is_copy)
        local = tuple(tensor.shape)
        parts = [(Box(offsets=(0,) * len(local), shape=local), tensor)]
        if ranges is not None and name in ranges:
            local, write, replica = tuple(record.shape), False, False
            parts = _parts(tensor, local, *ranges[name])
        shape = sharding.spec.global_shape(local, layout)
        offsets = sharding.spec.offsets(shape, layout, coords)
        for box, part in parts:
            at = tuple(o + p for o, p in zip(offsets, box.offsets, strict=True))
            where = {"global_shape": shape, "offsets": at}
            shards.append(
                TensorShard(f"{prefix}/{name}", part, **where, write=write, replica=replica)
            )
    return shards


def _parts(
    tensor: torch.Tensor, shape: tuple[int, ...], start: int, end: int
) -> list[tuple[Box, torch.Tensor]]:
    """Return the boxes of a range, each with its view of `tensor`."""
    flat = tensor.view(-1)
    if flat.numel() != end - start:
        raise ValueError(f"the range {start}:{end} is given by a tensor of {flat.numel()} elements")
    boxes = range_boxes(shape, start, end)
    parts = flat.split([math.prod(box.shape) for box in boxes])
    return [(box, part.view(box.shape)) for box, part in zip(boxes, parts, strict=True)]
