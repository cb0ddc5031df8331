"""How the weight of a linear layer lies: its dims, and what a group of ranks splits."""

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
    """What is read of a linear layer whose weight may be split over ranks.

    The record of `weight` (`mt_parallel_state.sharding_of`) says which dims are inputs and which
    one is split. The layers of mt-tensor-parallel are such ones.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    group: Group
    axis: str
    communicate: bool
    sequence_parallel: bool


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """The dims of a linear layer's weight on this rank, and its collectives.

    Attributes:
        outputs: Sizes of the dims of outputs.
        inputs: Sizes of the dims of inputs.
        split: Which of the two `group` splits; None for a whole weight.
        dim: Which of its dims.
        axis: Name of the mesh axis, for the records of parameters.
        group: The ranks.
        communicate: Whether the layer itself sends what the split needs.
        sequence_parallel: Whether activations outside are split along the sequence.
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

        Layers are `torch.nn.Linear` itself (not what derives from it, which may use its weight in
        other ways) and every module that is a `SplitLinear` with a matrix for a weight.

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
        """Outputs of this rank."""
        return prod(self.outputs)

    @property
    def columns(self) -> int:
        """Inputs of this rank."""
        return prod(self.inputs)

    @property
    def whole_rows(self) -> int:
        """Outputs of all ranks."""
        return self.rows * (group_size(self.group) if self.split == "outputs" else 1)

    @property
    def whole_columns(self) -> int:
        """Inputs of all ranks."""
        return self.columns * (group_size(self.group) if self.split == "inputs" else 1)

    @property
    def run(self) -> int:
        """How many inputs of this rank are next to each other in the whole weight."""
        return prod(self.inputs[self.dim :]) if self.split == "inputs" else self.columns

    def gathered(self, weight: Tensor) -> Tensor:
        """Return the whole weight as a matrix, an all-gather.

        Shape:
            weight: [*outputs, *inputs]. Returns [whole out, whole in].
        """
        if self.split is not None:
            dim = self.dim + (len(self.outputs) if self.split == "inputs" else 0)
            weight = gather_from_group(weight.detach(), self.group, dim=dim)
        return weight.flatten(0, len(self.outputs) - 1).flatten(1)

    def own(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Return which rows and columns of the whole weight are this rank's; None for all."""
        if self.split is None:
            return None, None
        local = getattr(self, self.split)
        ranks, rank = group_size(self.group), group_rank(self.group)
        whole = (*local[: self.dim], local[self.dim] * ranks, *local[self.dim + 1 :])
        index = torch.arange(prod(whole), device=device).view(whole)
        index = index.narrow(self.dim, rank * local[self.dim], local[self.dim]).flatten()
        return (index, None) if self.split == "outputs" else (None, index)

    def box(self, x: Tensor, dims: str) -> Tensor:
        """View a tensor with a dim for each of which a split makes boxes.

        Args:
            x: Of this rank.
            dims: A letter for each of its dims: `o` the outputs, `i` the inputs, a packed part of
                them or their groups, and anything else for what the layer does not split.

        Shape:
            Returns, in place of `o`, all outputs' dims; of `i`, the inputs' before the split one,
            and the rest in one.
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
            QuantizationError: The tensor has another number of dims.
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
        """Return the record of what `box` returned."""
        letter = "-" if self.split is None else self.split[0]
        if letter not in dims:
            return PartitionSpec()
        first = sum(len(self.outputs) if d == "o" else 1 for d in dims[: dims.index(letter)])
        return PartitionSpec(*(None,) * (first + self.dim), self.axis)

    @property
    def _before(self) -> tuple[int, ...]:
        """The inputs' dims before the split one."""
        return self.inputs[: self.dim] if self.split == "inputs" else ()

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of the product: flat, and gathered along the sequence if it is split.

        Forward: nothing or an all-gather; backward an all-reduce or a reduce-scatter.
        """
        x = x.flatten(-len(self.inputs)) if len(self.inputs) > 1 else x
        if self.split != "outputs" or not self.communicate:
            return x
        if self.sequence_parallel:
            return all_gather(x, self.group, dim=_SEQUENCE_DIM)
        return copy_to_group(x, self.group)

    def leave(self, y: Tensor) -> Tensor:
        """Return the output of the layer, before a bias: summed over ranks that split inputs.

        Forward: an all-reduce or a reduce-scatter; backward nothing or an all-gather.
        """
        if self.split != "inputs" or not self.communicate:
            return y
        if self.sequence_parallel:
            return reduce_scatter(y, self.group, dim=_SEQUENCE_DIM)
        return reduce_from_group(y, self.group)

    def whole_input(self, x: Tensor) -> Tensor:
        """Return a layer's input as one rank has it, for statistics; [tokens, whole in]."""
        if self.split == "inputs":
            x = gather_from_group(x, self.group, dim=self.dim - len(self.inputs))
        elif self.split == "outputs" and self.sequence_parallel and self.communicate:
            x = gather_from_group(x, self.group, dim=_SEQUENCE_DIM)
        return x.flatten(-len(self.inputs)).flatten(0, -2)

    def describe(self) -> dict[str, Any]:
        """Return sizes, as messages and fingerprints have them."""
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
