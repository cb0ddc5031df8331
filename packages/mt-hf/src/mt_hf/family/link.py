"""Links between elements of another framework's tensors and elements of our parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from mt_model import Sizes

if TYPE_CHECKING:
    from torch import Tensor

Range: TypeAlias = tuple[int, int]
"""First index of a dim, and one past the last."""

Area: TypeAlias = tuple[Range, ...]
"""A box of an array: a range of each dim."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A box of a source tensor that equals a box of a parameter, up to a reshape and a permutation.

    The part of the source is viewed with the dims of the target's box in another order, and then
    permuted: `source_part.view(...).permute(order) == target_box`. No value is computed, so bytes
    are preserved both ways.

    Attributes:
        source: Name of the source tensor.
        shape: Shape of the whole source tensor.
        target: Name of the parameter in the whole model.
        part: Range of the source by dim; other dims are whole.
        box: Range of the target by dim; other dims are whole.
        order: Dim of the source's view for each dim of the target; None for the same order.

    Example:
        Rows 0 to 63 of a fused matrix are the queries of 2 groups with 4 heads of 8 channels:

        >>> Link(
        ...     source="qkv.weight", shape=(96, 32), part={0: (0, 64)},
        ...     target="layers.0.mixer.qkv.weight", box={1: (0, 4)},
        ... ).area((2, 6, 8, 32))
        ((0, 2), (0, 4), (0, 8), (0, 32))
    """

    source: str
    shape: Sizes
    target: str
    part: Mapping[int, Range] = field(default_factory=dict)
    box: Mapping[int, Range] = field(default_factory=dict)
    order: Sizes | None = None

    @property
    def source_area(self) -> Area:
        """Box of the source."""
        return _area(self.shape, self.part)

    def area(self, target_shape: Sequence[int]) -> Area:
        """Return the box in the target, whose shape is given."""
        return _area(target_shape, self.box)

    def window(self, source: Tensor, target_shape: Sequence[int]) -> Tensor:
        """Return the part of a source tensor as the target's box, a view of its memory."""
        for dim, (start, stop) in self.part.items():
            source = source.narrow(dim, start, stop - start)
        sizes = sizes_of(self.area(target_shape))
        if self.order is None:
            return source.view(sizes)
        view = [0] * len(sizes)
        for size, dim in zip(sizes, self.order, strict=True):
            view[dim] = size
        return source.view(view).permute(self.order)


def leaves(source: str, target: str, *shape: int, bias: bool = True) -> Iterator[Link]:
    """Yield the weight of a linear layer or a norm, and its bias.

    Args:
        source: Prefix of the tensors.
        target: Prefix of the parameters.
        shape: Shape of the weight; the bias has its first dim.
        bias: Whether there is a bias.
    """
    yield Link(source=f"{source}.weight", shape=shape, target=f"{target}.weight")
    if bias:
        yield Link(source=f"{source}.bias", shape=shape[:1], target=f"{target}.bias")


def sizes_of(area: Area) -> Sizes:
    """Return the shape of a box."""
    return tuple(stop - start for start, stop in area)


def common(first: Area, second: Area) -> Area | None:
    """Return the box that two boxes share; None if they share no element."""
    pairs = zip(first, second, strict=True)
    both = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in pairs)
    return both if all(start < stop for start, stop in both) else None


def inside(area: Area, origin: Area) -> tuple[slice, ...]:
    """Return the index of a box in an array that holds the box `origin`."""
    pairs = zip(area, origin, strict=True)
    return tuple(slice(a[0] - o[0], a[1] - o[0]) for a, o in pairs)


def check_links(
    links: Iterable[Link],
    targets: Mapping[str, Sizes],
    *,
    family: str,
    padding: Mapping[str, Area] | None = None,
) -> None:
    """Check that links use every element of every source and of every target exactly once.

    Args:
        links: Links of one model.
        targets: Shape of each parameter.
        family: Name of the family, for messages.
        padding: Boxes of parameters without a source.

    Raises:
        ValueError: An element is unused or used twice; the message names the tensor.
    """
    shapes: dict[str, Sizes] = {}
    used: dict[str, list[Area]] = {}
    padded = padding or {}
    filled = {name: [padded[name]] if name in padded else [] for name in targets}
    for link in links:
        if link.target not in targets:
            raise ValueError(f"family {family}: the model has no parameter {link.target!r}")
        if shapes.setdefault(link.source, link.shape) != link.shape:
            raise ValueError(
                f"family {family}: {link.source} has the shapes {shapes[link.source]} and "
                f"{link.shape} in two links"
            )
        area = link.area(targets[link.target])
        if prod(sizes_of(link.source_area)) != prod(sizes_of(area)):
            raise ValueError(
                f"family {family}: {sizes_of(link.source_area)} of {link.source} can't be "
                f"{sizes_of(area)} of {link.target}"
            )
        used.setdefault(link.source, []).append(link.source_area)
        filled[link.target].append(area)
    for name, areas in used.items():
        _check_cover(f"family {family}: tensor {name}", shapes[name], areas)
    for name, areas in filled.items():
        _check_cover(f"family {family}: parameter {name}", targets[name], areas)


def _area(shape: Sequence[int], ranges: Mapping[int, Range]) -> Area:
    return tuple(ranges.get(dim, (0, size)) for dim, size in enumerate(shape))


def _check_cover(what: str, shape: Sizes, areas: list[Area]) -> None:
    """Raise ValueError unless every element of a shape is in exactly one of the boxes."""
    for area in areas:
        ends = zip(area, shape, strict=True)
        if not all(0 <= start < stop <= size for (start, stop), size in ends):
            raise ValueError(f"{what}: the box {area} does not lie within {shape}")
    ordered = sorted(areas)
    for index, area in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if area and other[0][0] >= area[0][1]:
                break
            if common(area, other) is not None:
                raise ValueError(f"{what}: the boxes {area} and {other} overlap")
    covered = sum(prod(sizes_of(area)) for area in areas)
    if covered != prod(shape):
        raise ValueError(f"{what} of shape {shape}: {covered} of {prod(shape)} elements are linked")
