"""A linear layer whose weight is stored in low precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from mt_parallel_state import shard_param, sharding_of
from torch import Tensor, nn

from mt_quant.activation import input_scale_of, round_input
from mt_quant.error import QuantizationError
from mt_quant.format import InputFormat, WeightFormat
from mt_quant.matmul import AUTO, Operands, matmul_for
from mt_quant.shape import LinearShape
from mt_quant.weight import QuantizedMatrix, QuantizedWeight

_KEPT = ("weight_scale", "input_scale", "input_step", "output_step")  # dtypes that `to` leaves


class QuantizedLinear(nn.Module):
    """A linear layer in place of another one, with its weight in low precision.

    It takes and gives what the layer did that it replaces: `torch.nn.Linear`, or a layer that is
    split over ranks, whose collectives it does itself. Its tensors are parameters without gradient
    and keep a dim for each of the weight's that a split makes boxes of, with its sharding record.
    Gradients flow to the input; rounding passes them on.

    State: `weight_data`, `weight_scale`, and where there are any `weight_zero`, `bias`,
    `input_scale`, `input_step`, `output_step`, `low_rank_down`, `low_rank_up`.

    Args:
        shape: Of the weight on this rank.
        format: Of the weight.
        input: How the input is rounded; None leaves it.
        output: How the output is rounded; None leaves it.
        kernel: Of `MATMULS`, by name; "auto" is the first that serves.

    Shape:
        As of the layer that it replaces.
    """

    weight_data: nn.Parameter
    weight_scale: nn.Parameter
    weight_zero: nn.Parameter | None
    bias: nn.Parameter | None
    input_scale: nn.Parameter | None
    input_step: nn.Parameter | None
    output_step: nn.Parameter | None
    low_rank_down: nn.Parameter | None
    low_rank_up: nn.Parameter | None
    _like: Tensor

    def __init__(
        self,
        shape: LinearShape,
        format: WeightFormat,
        *,
        input: InputFormat | None = None,
        output: InputFormat | None = None,
        kernel: str = AUTO,
    ) -> None:
        super().__init__()
        self.shape, self.format, self.kernel = shape, format, kernel
        self.input, self.output = input, output
        for name in ("weight_data", "weight_scale", "weight_zero", "bias", "input_scale"):
            self.register_parameter(name, None)
        for name in ("input_step", "output_step", "low_rank_down", "low_rank_up"):
            self.register_parameter(name, None)
        self.register_buffer("_like", torch.empty(0), persistent=False)  # follows `to`
        self._prepared: dict[str, tuple[Tensor, ...]] = {}

    @classmethod
    def from_layer(
        cls,
        layer: nn.Module,
        shape: LinearShape,
        matrix: QuantizedMatrix,
        *,
        input: InputFormat | None = None,
        output: InputFormat | None = None,
    ) -> Self:
        """Take the place of a layer, with this rank's part of what a method made of its weight.

        Args:
            layer: Its bias, dtype and mode are taken over.
            shape: `LinearShape.of(layer)`.
            matrix: Of the whole weight.
            input: As for the constructor.
            output: As for the constructor.

        Raises:
            QuantizationError: This rank's inputs cut groups that share a scale.
        """
        own = cls(shape, matrix.weight.format, input=input, output=output)
        weight = cast("nn.Parameter", layer.weight)
        own._like = weight.detach().new_empty(0)
        part = matrix.take(*shape.own(matrix.weight.data.device))
        for name, tensor in _tensors_of(part, weight.dtype).items():
            own._put(name, tensor.to(weight.device))
        if layer.bias is not None:
            bias = cast("nn.Parameter", layer.bias)
            record = sharding_of(bias)
            own.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
            shard_param(own.bias, record.spec, partial_grad=record.partial_grad)
        return own.train(layer.training)

    def _put(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor of the weight, with its record."""
        shape, group = self.shape, self.format.group
        if not name.startswith("weight_"):
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            return
        is_data = name == "weight_data"
        each = {
            "by_row": is_data or group != "tensor",
            "by_column": is_data or isinstance(group, int),
        }
        param = nn.Parameter(shape.boxed(tensor, **each), requires_grad=False)
        shard_param(param, shape.spec(**each))
        self.register_parameter(name, param)

    @property
    def quantized_weight(self) -> QuantizedWeight:
        """This rank's codes and scales; the tensors are the layer's own."""
        matrix = self.shape.matrix
        return QuantizedWeight(
            data=matrix(self.weight_data),
            scale=matrix(self.weight_scale),
            zero=None if self.weight_zero is None else matrix(self.weight_zero),
            format=self.format,
            columns=self.shape.columns,
        )

    @property
    def quantized_matrix(self) -> QuantizedMatrix:
        """This rank's weight with the scales of its input and what is added."""
        low_rank = None
        if self.low_rank_down is not None and self.low_rank_up is not None:
            low_rank = self.low_rank_down, self.low_rank_up
        return QuantizedMatrix(
            weight=self.quantized_weight, input_scale=self.input_scale, low_rank=low_rank
        )

    @property
    def weight(self) -> Tensor:
        """The values of this rank's weight, made anew, in the dtype of the layer.

        Shape:
            [*outputs, *inputs].
        """
        whole = self.quantized_matrix.dequantize().to(self._like.dtype)
        return whole.view(*self.shape.outputs, *self.shape.inputs)

    def forward(self, x: Tensor, weight: Tensor | None = None, *, with_bias: bool = True) -> Tensor:
        """Apply the layer; see the class for shapes.

        Args:
            x: The input.
            weight: Used in place of the layer's own, in full precision.
            with_bias: False leaves the bias to the caller.
        """
        shape = self.shape
        x = shape.enter(_as_autocast(x))
        rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
        y = self._multiply(rows) if weight is None else F.linear(rows, shape.matrix(weight))
        y = shape.leave(y.view(*x.shape[:-1], shape.rows))
        if self.bias is not None and with_bias:
            y = y + self.bias.flatten().to(y.dtype)
        if self.output is not None:
            y = self._round_output(y, self.output)
        return y.unflatten(-1, shape.outputs) if len(shape.outputs) > 1 else y

    def _multiply(self, x: Tensor) -> Tensor:
        if self.input_scale is not None:
            x = x * self.input_scale.to(x.dtype)
        scale = None
        if self.input is not None:
            group = self.shape.group if self.shape.split == "inputs" else None
            scale = input_scale_of(x, self.input, step=self.input_step, group=group)
        operands = Operands(x=x, weight=self.quantized_weight, input=self.input, scale=scale)
        if torch.is_grad_enabled() and x.requires_grad:
            y = cast(Tensor, _Product.apply(x, self, operands))
        else:
            y = self._product(operands)
        if self.low_rank_down is not None and self.low_rank_up is not None:
            low = F.linear(x, self.low_rank_down.to(x.dtype))
            y = y + F.linear(low, self.low_rank_up.to(x.dtype))
        return y

    def _product(self, operands: Operands) -> Tensor:
        chosen = matmul_for(self.kernel, operands)
        if chosen.name not in self._prepared:
            self._prepared[chosen.name] = chosen.prepare(operands.weight)
        ready = self._prepared[chosen.name]
        return chosen.run(
            Operands(
                x=operands.x,
                weight=operands.weight,
                input=operands.input,
                scale=operands.scale,
                prepared=ready,
            )
        )

    def _round_output(self, y: Tensor, format: InputFormat) -> Tensor:
        group = self.shape.group if self.shape.split == "outputs" else None
        rows = y.flatten(0, -2) if y.dim() > 1 else y[None]
        scale = input_scale_of(rows, format, step=self.output_step, group=group)
        rounded = round_input(rows.detach(), scale, format).view_as(y)
        return y + (rounded - y.detach()) if y.requires_grad else rounded

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002 - torch's own
        """Move, and change the dtype of all but the scales, which belong to the codes."""
        kept = {name: getattr(self, name) for name in _KEPT}
        dtypes = {name: param.dtype for name, param in kept.items() if param is not None}
        before = {name: kept[name].detach() for name in dtypes}
        super()._apply(fn, recurse)
        for name, dtype in dtypes.items():
            param = getattr(self, name)
            if param.dtype != dtype:
                param.data = before[name].to(param.device)
        self._prepared = {}
        return self

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride] - all passed on
        self, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        """Refuse codes without their scales, also where torch would not be strict."""
        own = [name for name, param in self._parameters.items() if param is not None]
        given = [name for name in own if f"{prefix}{name}" in state_dict]
        missing = [name for name in own if name not in given]
        if given and missing:
            raise QuantizationError(
                f"{prefix.rstrip('.')}: the state has {', '.join(given)} but no "
                f"{', '.join(missing)}; codes mean nothing without their scales, so load a "
                "complete state of the same recipe"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._prepared = {}

    def extra_repr(self) -> str:
        """The sizes and formats that torch prints."""
        shape = self.shape
        return (
            f"outputs={shape.outputs}, inputs={shape.inputs}, split={shape.split}, "
            f"weight={self.format}, input={self.input}, output={self.output}, "
            f"bias={self.bias is not None}, kernel={self.kernel!r}"
        )


class _Product(torch.autograd.Function):
    """A product whose gradient passes the rounding of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear, operands: Operands) -> Tensor:
        ctx.layer = layer
        return layer._product(operands)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        weight = ctx.layer.quantized_weight.dequantize(grads[0].dtype)
        return grads[0] @ weight, None, None


def _as_autocast(x: Tensor) -> Tensor:
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _tensors_of(matrix: QuantizedMatrix, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a matrix by their names in a layer's state."""
    weight = matrix.weight
    tensors: dict[str, Tensor | None] = {
        "weight_data": weight.data,
        "weight_scale": weight.scale,
        "weight_zero": weight.zero,
        "input_scale": None if matrix.input_scale is None else matrix.input_scale.float(),
    }
    if matrix.low_rank is not None:
        down, up = matrix.low_rank
        tensors |= {"low_rank_down": down.to(dtype), "low_rank_up": up.to(dtype)}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
