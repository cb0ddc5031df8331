"""Shape of a linear layer's weight: its dims, and the dim that ranks split."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Literal, Protocol, Self, runtime_checkable

import torch
from mt_parallel_state import (
    Group,
    PartitionSpec,
    all_gather,
    copy_to_group,
    gather_from_group,
    group_rank,
    group_size,
    reduce_from_group,
    reduce_scatter,
    sharding_of,
)
from torch import Tensor, nn

from mt_quant.error import QuantizationError

_SEQUENCE_DIM = 1


@runtime_checkable
class SplitLinear(Protocol):
    """Attributes that mt-quant reads from a linear layer that may be split over ranks.

    The record of `weight` (`mt_parallel_state.sharding_of`) says which dims are inputs and which
    dim is split. The layers of mt-tensor-parallel have these attributes.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    group: Group
    axis: str
    communicate: bool
    sequence_parallel: bool


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """Dims of a linear layer's weight on this rank, and the layer's collectives.

    Attributes:
        outputs: Sizes of the output dims.
        inputs: Sizes of the input dims.
        split: The side that `group` splits; None for a whole weight.
        dim: Index of the split dim among the dims of that side.
        axis: Name of the mesh axis, for the sharding records of parameters.
        group: The ranks that split the weight.
        communicate: Whether the layer runs the collectives that the split needs.
        sequence_parallel: Whether activations outside the layer are split along the sequence.
    """

    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    split: Literal["outputs", "inputs"] | None = None
    dim: int = 0
    axis: str = "tp"
    group: Group = None
    communicate: bool = True
    sequence_parallel: bool = False

    @classmethod
    def of(cls, layer: nn.Module) -> Self | None:
        """Return the shape of a linear layer; None for any other module.

        Linear layers are `torch.nn.Linear` itself (a subclass may use its weight in other ways)
        and every module with the attributes of `SplitLinear` whose weight is marked as a matrix.

        Raises:
            QuantizationError: The weight is split in a way that the layer does not describe.
        """
        if type(layer) is nn.Linear:
            return cls(outputs=(layer.out_features,), inputs=(layer.in_features,))
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, nn.Parameter) or not isinstance(layer, SplitLinear):
            return None
        record = sharding_of(weight)
        if record.matrix is None:
            return None
        count = weight.dim() - record.matrix.in_dims
        sizes = tuple(weight.shape[:count]), tuple(weight.shape[count:])
        dims = [dim for dim, axes in enumerate(record.spec.dims) if axes]
        if group_size(layer.group) == 1:
            return cls(outputs=sizes[0], inputs=sizes[1])
        # A copied parameter has lost its record, which looks like a whole weight here.
        if len(dims) != 1 or record.spec.dims[dims[0]] != (layer.axis,):
            raise QuantizationError(
                f"a weight with {record.spec!r} is not split in one dim over {layer.axis!r}, the "
                "axis of its layer; call mt_parallel_state.shardings(model) before it is copied"
            )
        split = "outputs" if dims[0] < count else "inputs"
        return cls(
            outputs=sizes[0],
            inputs=sizes[1],
            split=split,
            dim=dims[0] - (0 if split == "outputs" else count),
            axis=layer.axis,
            group=layer.group,
            communicate=layer.communicate,
            sequence_parallel=layer.sequence_parallel,
        )

    @property
    def rows(self) -> int:
        """Number of outputs on this rank."""
        return prod(self.outputs)

    @property
    def columns(self) -> int:
        """Number of inputs on this rank."""
        return prod(self.inputs)

    @property
    def whole_rows(self) -> int:
        """Number of outputs over all ranks."""
        return self.rows * (group_size(self.group) if self.split == "outputs" else 1)

    @property
    def whole_columns(self) -> int:
        """Number of inputs over all ranks."""
        return self.columns * (group_size(self.group) if self.split == "inputs" else 1)

    @property
    def run(self) -> int:
        """Number of neighbouring inputs of the whole weight that this rank has."""
        return prod(self.inputs[self.dim :]) if self.split == "inputs" else self.columns

    def gathered(self, weight: Tensor) -> Tensor:
        """Return the whole weight as a matrix; an all-gather where ranks split it.

        Shape:
            weight: [*outputs, *inputs]. Returns [whole out, whole in].
        """
        if self.split is not None:
            dim = self.dim + (len(self.outputs) if self.split == "inputs" else 0)
            weight = gather_from_group(weight.detach(), self.group, dim=dim)
        return weight.flatten(0, len(self.outputs) - 1).flatten(1)

    def own(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Return the indices of this rank's rows and columns in the whole weight; None for all."""
        if self.split is None:
            return None, None
        local = getattr(self, self.split)
        ranks, rank = group_size(self.group), group_rank(self.group)
        whole = (*local[: self.dim], local[self.dim] * ranks, *local[self.dim + 1 :])
        index = torch.arange(prod(whole), device=device).view(whole)
        index = index.narrow(self.dim, rank * local[self.dim], local[self.dim]).flatten()
        return (index, None) if self.split == "outputs" else (None, index)

    def box(self, x: Tensor, dims: str) -> Tensor:
        """View a tensor so that every rank's part is a box of the whole tensor.

        Args:
            x: This rank's tensor.
            dims: A letter for each dim: `o` for outputs, `i` for inputs (also packed or grouped),
                any other letter for a dim that the layer does not split.

        Shape:
            Returns all output dims in place of `o`, and in place of `i` the input dims before the
            split dim and one dim for the rest.
        """
        sizes: list[int] = []
        for letter, size in zip(dims, x.shape, strict=True):
            before = self._before
            own = {"o": self.outputs, "i": (*before, size // prod(before))}
            sizes += own.get(letter, (size,))
        return x.view(sizes)

    def unbox(self, x: Tensor, dims: str) -> Tensor:
        """Undo `box`.

        Raises:
            QuantizationError: The tensor has a wrong number of dims.
        """
        counts = [{"o": len(self.outputs), "i": len(self._before) + 1}.get(d, 1) for d in dims]
        if x.dim() != sum(counts):
            raise QuantizationError(
                f"expected {sum(counts)} dims for {self.outputs} outputs and {self.inputs} inputs, "
                f"got a tensor of shape {tuple(x.shape)}"
            )
        for dim, count in enumerate(counts):
            x = x.flatten(dim, dim + count - 1)
        return x

    def spec(self, dims: str) -> PartitionSpec:
        """Return the partition spec of a tensor that `box` returned."""
        letter = "-" if self.split is None else self.split[0]
        if letter not in dims:
            return PartitionSpec()
        first = sum(len(self.outputs) if d == "o" else 1 for d in dims[: dims.index(letter)])
        return PartitionSpec(*(None,) * (first + self.dim), self.axis)

    @property
    def _before(self) -> tuple[int, ...]:
        """Sizes of the input dims before the split dim."""
        return self.inputs[: self.dim] if self.split == "inputs" else ()

    def enter(self, x: Tensor) -> Tensor:
        """Return the product's input: flat, and gathered along a split sequence.

        Forward: nothing or an all-gather. Backward: an all-reduce or a reduce-scatter.
        """
        x = x.flatten(-len(self.inputs)) if len(self.inputs) > 1 else x
        if self.split != "outputs" or not self.communicate:
            return x
        if self.sequence_parallel:
            return all_gather(x, self.group, dim=_SEQUENCE_DIM)
        return copy_to_group(x, self.group)

    def leave(self, y: Tensor) -> Tensor:
        """Return the layer's output before a bias, summed over ranks that split the inputs.

        Forward: an all-reduce or a reduce-scatter. Backward: nothing or an all-gather.
        """
        if self.split != "inputs" or not self.communicate:
            return y
        if self.sequence_parallel:
            return reduce_scatter(y, self.group, dim=_SEQUENCE_DIM)
        return reduce_from_group(y, self.group)

    def whole_input(self, x: Tensor) -> Tensor:
        """Return a layer's whole input, for statistics: [tokens, whole in]."""
        if self.split == "inputs":
            x = gather_from_group(x, self.group, dim=self.dim - len(self.inputs))
        elif self.split == "outputs" and self.sequence_parallel and self.communicate:
            x = gather_from_group(x, self.group, dim=_SEQUENCE_DIM)
        return x.flatten(-len(self.inputs)).flatten(0, -2)

    def describe(self) -> dict[str, Any]:
        """Return the sizes as plain values, for messages and fingerprints."""
        return {"outputs": list(self.outputs), "inputs": list(self.inputs), "split": self.split}


def shape_of(layer: nn.Module, name: str) -> LinearShape:
    """Return the shape of a linear layer.

    Raises:
        QuantizationError: The layer, which the message calls `name`, is no linear layer.
    """
    shape = LinearShape.of(layer)
    if shape is None:
        raise QuantizationError(f"{name} is {type(layer).__name__}, no linear layer")
    return shape
