"""Frozen weights as codes of mt-quant, beside which adapters are trained (QLoRA)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from mt_moe import GroupedLinear
from mt_parallel_state import Group, PartitionSpec, shard_param, sharding_of, shardings
from mt_quant import (
    QuantizationError,
    QuantizedWeight,
    WeightFormat,
    check_part,
    quantize_part,
)
from mt_tensor_parallel import Gemm, GemmLayer, Operand, Role
from torch import Tensor, nn

from mt_model.block.initial import start_from
from mt_model.stack.fake_quantization import block_linears, grouped_layers, matrix_shape

NAME = "codes"  # of the submodule


class WeightCodes(nn.Module):
    """Codes of a linear layer's frozen weight, which take the weight's place.

    `weight` of the layer becomes the codes, in the bytes of the format, and this is the layer's
    submodule `codes` with their scales, zero points and levels. The layer multiplies the
    dequantised values, forward and backward, made anew for each product and rounded once to the
    dtype of its input (Dettmers et al. 2023, arXiv 2305.14314). A layer of experts has codes for
    each expert. All are parameters without gradient, with sharding records.

    Args:
        layer: The layer, whose weight is dropped; `store` gives its values.
        format: Number format.
        group: Group of the ranks that share an expert (etp).

    Attributes:
        format: Number format.
        shape: Sizes and split of this rank's weight, or of an expert's.
        full_shape: Shape of this rank's weight in full precision.
        record: Sharding record of the weight in full precision.

    Raises:
        QuantizationError: The format does not fit this rank's inputs.
    """

    scale: nn.Parameter
    zero: nn.Parameter | None
    level: nn.Parameter | None

    def __init__(self, layer: GemmLayer, format: WeightFormat, *, group: Group = None) -> None:
        super().__init__()
        weight = layer.weight
        self.format, self.shape = format, matrix_shape(layer, group)
        self.full_shape, self.record = tuple(weight.shape), sharding_of(weight)
        check_part(format, self.shape)
        self._layer = (layer,)  # a tuple, as it is no submodule
        scale = format.scale_dims
        self._dims = {"data": "oi", "scale": scale, "zero": scale, "level": "11"}
        rows, columns = self.shape.rows, self.shape.columns
        like = QuantizedWeight.empty(rows, columns, format, device=weight.device)
        for name in ("scale", "zero", "level"):
            self.register_parameter(name, self._parameter(like, name))
        data = self._parameter(like, "data")
        assert data is not None, "a weight has codes"  # noqa: S101
        layer.weight = data
        layer.add_module(NAME, self)

    def _parameter(self, like: QuantizedWeight, name: str) -> nn.Parameter | None:
        """Return a parameter for one of the tensors of all matrices, with its sharding record."""
        tensor: Tensor | None = getattr(like, name)
        if tensor is None:
            return None
        lead, letters = self._layer[0].lead_dims, self._dims[name]
        boxed = self.shape.box(tensor, letters)
        values = boxed.new_empty(*self.full_shape[:lead], *boxed.shape)
        spec = PartitionSpec(*self.record.spec.dims[:lead], *self.shape.spec(letters).dims)
        param = nn.Parameter(values, requires_grad=False)
        start_from(param, "zeros")
        return shard_param(param, spec, is_copy=self.record.is_copy)

    def quantized(self, data: Tensor, expert: int | None = None) -> QuantizedWeight:
        """Return codes with their scales; nothing is copied.

        Args:
            data: The layer's codes, or an expert's, as a matrix.
            expert: Index of the expert on this rank; None for a layer without experts.
        """
        found: dict[str, Tensor | None] = {"data": data}
        for name in ("scale", "zero", "level"):
            own: Tensor | None = getattr(self, name)
            own = own if own is None or expert is None else own[expert]
            found[name] = None if own is None else self.shape.unbox(own, self._dims[name])
        return QuantizedWeight(**found, format=self.format, columns=self.shape.columns)  # pyright: ignore[reportArgumentType]

    @torch.no_grad()
    def store(self, weight: Tensor) -> None:
        """Round a weight, and keep its codes.

        They are those that one rank gives to the whole weight: an all-gather where ranks split
        numbers that share a scale.

        Args:
            weight: This rank's weight in full precision.

        Shape:
            weight: `full_shape`.

        Raises:
            QuantizationError: The weight is not finite.
        """
        if not self._layer[0].lead_dims:
            self._keep(weight, ...)
            return
        for expert, own in enumerate(weight):
            self._keep(own, expert)

    def _keep(self, weight: Tensor, place: Any) -> None:
        made = quantize_part(weight, self.format, self.shape)
        params = {"data": self._layer[0].weight, "scale": self.scale}
        params |= {"zero": self.zero, "level": self.level}  # pyright: ignore[reportAssignmentType]
        for name, param in params.items():
            if param is not None:
                param[place].copy_(getattr(made, name).reshape(param[place].shape))

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values by which the layer multiplies, a new tensor.

        Shape:
            Returns `full_shape`.
        """
        lead, weight = self._layer[0].lead_dims, self._layer[0].weight
        experts: Sequence[int | None] = range(len(weight)) if lead else [None]
        rows = weight.reshape(len(experts), self.shape.rows, -1)
        found = [
            self.quantized(data, expert).dequantize(dtype)
            for data, expert in zip(rows, experts, strict=True)
        ]
        return torch.stack(found).view(self.full_shape)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002 - torch's own
        """Move the scales, but keep their dtypes, which belong to the codes."""
        return super()._apply(lambda x: fn(x.view(torch.uint8)).view(x.dtype), recurse)

    def extra_repr(self) -> str:
        """Return format and shape, for `repr`."""
        return f"{self.format}, shape={self.full_shape}"


class CodesGemm(Gemm):
    """Products with the dequantised values of codes.

    Args:
        products: The products of the values, whose operands are the tensors themselves.
        codes: The codes of the layer.
        expert: Index of the expert on this rank; None for a layer without experts.
    """

    def __init__(self, products: Gemm, codes: WeightCodes, expert: int | None = None) -> None:
        self.products, self.codes, self.expert = products, codes, expert
        self.row_multiple = products.row_multiple

    def operand(self, x: Tensor, role: Role) -> Operand:
        """Return a weight's codes with their scales; see `Gemm.operand`."""
        return self.codes.quantized(x, self.expert) if role == "weight" else x

    def saved(self, operand: Operand) -> tuple[Tensor, ...]:
        """Keep codes, not values; see `Gemm.saved`."""
        return (operand.data if isinstance(operand, QuantizedWeight) else operand,)

    def restored(self, tensors: Sequence[Tensor], role: Role) -> Operand:
        """See `Gemm.restored`."""
        return self.operand(tensors[0], role)

    def forward(self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
        """Return `x @ weight.T + bias`; see `Gemm` for shapes."""
        return self.products.forward(x, weight.dequantize(x.dtype), bias)

    def dgrad(self, grad_y: Tensor, weight: QuantizedWeight) -> Tensor:
        """Return `grad_y @ weight`, of the values that forward multiplied."""
        return self.products.dgrad(grad_y, weight.dequantize(grad_y.dtype))

    def __repr__(self) -> str:
        return f"CodesGemm({self.codes.format}, {self.products!r})"


def code_weights(
    stage: nn.Module, format: str, *, group: Group = None, has_values: bool = True
) -> None:
    """Replace the weights of a stage's linear layers by codes, experts' too; others stay.

    Args:
        stage: The stage, whose blocks' weights are frozen.
        format: Name of the number format, as `mt_quant.WeightFormat.named` takes it.
        group: Group of the ranks that share an expert (etp).
        has_values: Whether the weights have values to round; otherwise `store` gives them.

    Raises:
        QuantizationError: The format is unknown, or does not fit the inputs of a layer.
    """
    chosen = WeightFormat.named(format)
    for name, layer in {**block_linears(stage), **grouped_layers(stage)}.items():
        weight = layer.weight
        try:
            codes = WeightCodes(layer, chosen, group=group)
            if has_values:
                codes.store(weight.detach())
        except QuantizationError as error:
            raise QuantizationError(f"{name}: {error}") from error
        if isinstance(layer, GroupedLinear):
            own = [CodesGemm(gemm, codes, i) for i, gemm in enumerate(layer.gemms.all)]
        else:
            own = [CodesGemm(layer.gemm, codes)]
        left = iter(own)
        layer.choose_gemm(name, lambda _, left=left: next(left))
    shardings(stage)  # from here the stage answers for the records of codes too


def weight_codes(stage: nn.Module) -> Mapping[str, WeightCodes]:
    """Return the codes of a stage's linear layers by the names of their layers."""
    named = stage.named_modules()
    return {name.rpartition(".")[0]: m for name, m in named if isinstance(m, WeightCodes)}
