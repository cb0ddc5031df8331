"""Weights held in 8 bits only, with fp32 masters that ranks step in parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from math import prod
from operator import attrgetter
from typing import Protocol

import torch
import torch.distributed as dist
from mt_files import check_type, did_you_mean, shorten
from torch import Tensor, nn

from mt_fp8.block import scales_shape
from mt_fp8.linear import QuantizedLinear
from mt_fp8.operand import Operand
from mt_fp8.products import Products
from mt_fp8.qtensor import QTensor
from mt_fp8.quantize import amax_of, quantize, scaling_of
from mt_fp8.recipe import RECIPES, Recipe
from mt_fp8.scale import factor_of, scale_of
from mt_fp8.scaling import Scaling


class WeightPart(Protocol):
    """What a rank steps of one weight; `shard` of mt-data-parallel passes them."""

    @property
    def name(self) -> str:
        """The parameter's name."""
        ...

    @property
    def source(self) -> Tensor:
        """The parameter, for where it is."""
        ...

    @property
    def values(self) -> Tensor:
        """The elements that this rank steps, [n]; none where it has none."""
        ...

    @property
    def codes(self) -> Tensor:
        """Where their codes go, uint8 [n]."""
        ...

    @property
    def start(self) -> int:
        """The first one's place in the flattened parameter."""
        ...

    @property
    def shards(self) -> dist.ProcessGroup | None:
        """Ranks with the other parts, or None."""
        ...


class PrimaryWeights:
    """Quantised weights in place of parameters; the optimizer holds the fp32 masters.

    A layer multiplies by codes anyway. With this class ranks keep and gather only the codes: one
    byte for an element in place of two or four. It is the `encoding` of `mt_data_parallel.shard`:
    ranks step shares of the fp32 masters, agree on the largest magnitudes (one all-reduce, MAX),
    encode their shares, and gather bytes. Codes and scales equal those of `quantize` on the whole
    master, however it is cut.

    The recipe needs equal scales along rows and columns and codes of one byte, so that the values
    are never needed again: `tensorwise`, `delayed` and `blockwise` qualify.

    Args:
        names: Names of the parameters held in codes; `bind` gives each of them its layers.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        >>> _ = convert_linears(model, "blockwise")
        >>> sorted(PrimaryWeights.of(model).names)
        ['0.weight', '2.weight']
    """

    def __init__(self, names: Collection[str]) -> None:
        check_type("names", names, Collection)
        if isinstance(names, str):
            raise TypeError(f"names must be several names, got the string {shorten(names)}")
        self.names = frozenset(names)
        self._codes: dict[str, Tensor] = {}
        self._layers: dict[str, tuple[Tensor, Sequence[Products]]] = {}

    @classmethod
    def of(cls, module: nn.Module) -> PrimaryWeights:
        """Hold the weights of all layers that `convert_linears` converted, by their names.

        Raises:
            ValueError: There are none, two share a weight, or their recipe does not allow it.
        """
        check_type("module", module, nn.Module)
        named = module.named_modules()
        layers = {f"{n}.weight": m for n, m in named if isinstance(m, QuantizedLinear)}
        if not layers:
            raise ValueError("the module has no quantised layers; call convert_linears first")
        if len({id(layer.weight) for layer in layers.values()}) < len(layers):
            raise ValueError(
                "two layers share a weight, whose codes one of them would not get; convert all but "
                "one with keep=, or give each its own"
            )
        found = cls(layers)
        for name, layer in layers.items():
            found.bind(name, layer.weight, [layer.products])
        return found

    def bind(self, name: str, weight: Tensor, layers: Sequence[Products]) -> None:
        """Say which layers multiply by a parameter: one, or one for each matrix of a stack of them.

        Args:
            name: One of `names`.
            weight: The parameter as they multiply it, for shape and dtype; its values are not read.
            layers: Their strategies, in the order of the matrices.

        Shape:
            weight: [out, in] for one layer, [layers, out, in] for several.

        Raises:
            ValueError: The name is another, the shape does not fit, or the recipe of a layer does
                not allow it.
        """
        if name not in self.names:
            raise ValueError(
                f"{shorten(name)} is no primary weight. {did_you_mean(name, self.names)}"
            )
        if weight.shape[:-2].numel() != len(layers) or weight.dim() < 2:
            raise ValueError(
                f"{shorten(name)} is {tuple(weight.shape)}, and there are {len(layers)} layers; "
                "give [out, in] for one, or [layers, out, in]"
            )
        for each in layers:
            if not _can_be_primary(each.recipe):
                able = ", ".join(key for key, known in RECIPES.items() if _can_be_primary(known))
                raise ValueError(
                    f"{shorten(name)}: recipe {each.recipe.name!r} has no codes of a byte that "
                    f"serve along rows and columns of a weight; use one of {able}"
                )
        like = torch.empty(weight.shape[-2:], dtype=weight.dtype, device="meta")
        self._layers[name] = like, layers

    def encodes(self, name: str, param: Tensor) -> bool:
        """Return whether a parameter is held in codes."""
        del param
        return name in self.names

    def place(self, name: str, codes: Tensor) -> None:
        """Take note of where the codes of a whole parameter are."""
        self._codes[name] = codes

    @torch.no_grad()
    def encode(self, parts: Sequence[WeightPart]) -> None:
        """Write the codes of this rank's parts, and have the layers multiply by the new weights.

        Ranks of `shards`, and those over which a layer's scales span, call it together.

        Raises:
            RuntimeError: A weight has no layer yet.
        """
        matrices = [matrix for part in parts for matrix in self._matrices(part)]
        for matrix in matrices:
            matrix.find_amax()
        for group_of in (attrgetter("shards"), attrgetter("span")):
            for group in dict.fromkeys(map(group_of, matrices)):
                _agree([matrix for matrix in matrices if group_of(matrix) is group], group)
        for matrix in matrices:
            matrix.encode()

    def _matrices(self, part: WeightPart) -> Iterator[_Matrix]:
        if part.name not in self._layers:
            raise RuntimeError(
                f"nobody said which layer multiplies by {shorten(part.name)}; call bind() before "
                "the first gather_params()"
            )
        like, layers = self._layers[part.name]
        codes = self._codes[part.name]

        def whole(number: int) -> Tensor:
            return codes.view(-1, *like.shape)[number]

        # Views of memory that is not there can't be made: `whole` waits for a forward.
        for number, products in enumerate(layers):
            yield _Matrix(part, products, partial(whole, number), number * like.numel(), like)


class _Matrix:
    """One layer's weight, of which this rank steps a range of elements.

    Args:
        part: What it steps of the parameter.
        products: The layer's strategy.
        codes: Returns the codes of the whole matrix, once they exist.
        first: The matrix's first element in the flattened parameter.
        like: A meta tensor with the shape and dtype of the matrix.
    """

    def __init__(
        self,
        part: WeightPart,
        products: Products,
        codes: Callable[[], Tensor],
        first: int,
        like: Tensor,
    ) -> None:
        self.shards, self._products, self._codes, self._like = part.shards, products, codes, like
        self._scaling, size = _weight_scaling(products.recipe), like.numel()
        shape = scales_shape(like.shape, self._scaling)
        self.amax = torch.zeros(shape, device=part.source.device)
        begin = min(max(part.start - first, 0), size)
        end = min(max(part.start + part.values.numel() - first, begin), size)
        inside = slice(begin + first - part.start, end + first - part.start)
        self._values, self._own = part.values[inside], part.codes[inside]
        self._place(begin, end)

    def _place(self, begin: int, end: int) -> None:
        """Find the whole rows, of whole blocks, around the range."""
        rows, columns = self._like.shape
        side = 1 if isinstance(self._scaling.block, str) else self._scaling.block[0]
        top = begin // columns // side * side
        below = min(-(-end // (columns * side)) * side, rows)
        self._shape, self._skipped = (below - top, columns), begin - top * columns
        self._blocks = slice(top // side, -(-below // side))

    @property
    def span(self) -> dist.ProcessGroup | None:
        """Ranks with other parts of what one scale is made of."""
        split = self._products.splits.get("weight") if self._scaling.block == "tensor" else None
        return None if split is None else split.both

    def find_amax(self) -> None:
        """Find the magnitudes of blocks, as far as the range goes into them; 0 elsewhere."""
        if self._values.numel():
            self._in_range(self.amax).copy_(amax_of(self._rows(), self._scaling))

    def encode(self) -> None:
        """Write the codes of the range, and have the layer multiply by the whole matrix."""
        delayed = self._products.delayed
        factor = None if delayed is None else delayed.of("weight")
        if factor is None:
            factor = factor_of(self.amax, self._scaling)
        if self._values.numel():
            own = self._in_range(factor).to(self._values.device)
            made = quantize(self._rows(), self._scaling, factor=own).data.view(torch.uint8)
            self._own.copy_(made.flatten()[self._skipped :][: self._own.numel()])
        amax = None if delayed is None else self.amax
        self._products.hold(partial(self._operand, scale_of(factor, self._scaling), amax))

    def _operand(self, scales: Tensor, amax: Tensor | None) -> Operand:
        shape, dtype = tuple(self._like.shape), self._like.dtype
        data = self._codes().view(self._scaling.elements.dtype)
        rows = QTensor(data=data, scales=scales, scaling=self._scaling, dtype=dtype, shape=shape)
        return Operand(role="weight", dtype=dtype, shape=shape, rows=rows, amax=amax)

    def _in_range(self, scales: Tensor) -> Tensor:
        return scales[self._blocks] if scales.dim() else scales

    def _rows(self) -> Tensor:
        """Return the rows with zeros in the place of what other ranks step."""
        if self._values.numel() == prod(self._shape):
            return self._values.view(self._shape)
        rows = self._values.new_zeros(self._shape)
        rows.view(-1)[self._skipped :][: self._values.numel()] = self._values
        return rows


def _agree(matrices: Sequence[_Matrix], group: dist.ProcessGroup | None) -> None:
    """Make the magnitudes the largest of all ranks of a group, by one all-reduce."""
    if group is None or not matrices:
        return
    flat = torch.cat([matrix.amax.view(-1) for matrix in matrices])
    dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=group)
    sizes = [matrix.amax.numel() for matrix in matrices]
    for matrix, amax in zip(matrices, flat.split(sizes), strict=True):
        matrix.amax = amax.view_as(matrix.amax)


def _can_be_primary(recipe: Recipe) -> bool:
    """Whether a weight's codes serve along rows and columns, and each is a byte of its own."""
    scaling = recipe.scaling("weight")
    return scaling is not None and scaling.is_square and scaling.elements.per_byte == 1


def _weight_scaling(recipe: Recipe) -> Scaling:
    """Return the scaling of weights, with the room that a delayed recipe leaves."""
    scaling = scaling_of(recipe, "weight")
    return dataclasses.replace(scaling, margin=scaling.margin + recipe.margin)
