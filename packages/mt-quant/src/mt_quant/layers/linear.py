"""A linear layer whose weight is stored as codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from mt_kernels import AUTO, Selector
from mt_parallel_state import shard_param, sharding_of
from torch import Tensor, nn

from mt_quant.error import QuantizationError
from mt_quant.formats.format import InputFormat, WeightFormat
from mt_quant.formats.weight import QuantizedMatrix, QuantizedWeight, quantize_weight
from mt_quant.layers.matmul import MATMULS, Operands, Product
from mt_quant.layers.shape import LinearShape

_KEPT = ("weight_scale", "weight_level", "input_scale", "input_step")  # `to` leaves their dtypes
CODES = (
    *("weight_data", "weight_scale", "weight_zero", "weight_level", "input_scale"),
    *("low_rank_down", "low_rank_up", "input_step"),
)
"""Names of the tensors that a layer's state may contain, besides its bias."""


class QuantizedLinear(nn.Module):
    """A linear layer with a quantised weight, which replaces a layer in full precision.

    It has the input and output of the replaced layer: `torch.nn.Linear`, or a layer split over
    ranks, whose collectives this layer runs. The tensors are parameters without gradient; they
    keep the weight's dims, so that every rank's part is a box, and carry sharding records.
    Gradients flow to the input and pass the rounding unchanged.

    State: `weight_data`, `weight_scale`, and optionally `weight_zero`, `weight_level`, `bias`,
    `input_scale`, `input_step`, `low_rank_down`, `low_rank_up`.

    Args:
        shape: Shape of the weight on this rank.
        format: Number format of the weight.
        input: Format to round the input to; None leaves it.
        kernel: Name of a candidate of `quantized_matmul`; "auto" is the first that serves.

    Shape:
        The same as the replaced layer.
    """

    weight_data: nn.Parameter
    weight_scale: nn.Parameter
    weight_zero: nn.Parameter | None
    weight_level: nn.Parameter | None
    bias: nn.Parameter | None
    input_scale: nn.Parameter | None
    input_step: nn.Parameter | None
    low_rank_down: nn.Parameter | None
    low_rank_up: nn.Parameter | None
    _like: Tensor

    def __init__(
        self,
        shape: LinearShape,
        format: WeightFormat,
        *,
        input: InputFormat | None = None,
        kernel: str = AUTO,
    ) -> None:
        super().__init__()
        self.shape, self.format = shape, format
        self.selector = Selector(MATMULS, kernel)
        self.input = input
        for name in (*CODES, "bias"):
            self.register_parameter(name, None)
        self.register_buffer("_like", torch.empty(0), persistent=False)  # follows `to`
        self._prepared: dict[Product, tuple[Tensor, ...]] = {}
        self._matrix: QuantizedMatrix | None = None
        self._versions: tuple[object, ...] = ()

    @classmethod
    def from_layer(
        cls,
        layer: nn.Module,
        shape: LinearShape,
        tensors: Mapping[str, Tensor],
        *,
        format: WeightFormat,
        input: InputFormat | None = None,
    ) -> Self:
        """Return a layer that replaces `layer`, with the tensors that `tensors_of` returned.

        Args:
            layer: The replaced layer, whose bias, dtype, device and mode are kept.
            shape: `LinearShape.of(layer)`.
            tensors: This rank's codes and scales by name.
            format: See the constructor.
            input: See the constructor.

        Raises:
            QuantizationError: A tensor is missing, unknown, or does not fit the weight.
        """
        own = cls(shape, format, input=input)
        weight = cast("nn.Parameter", layer.weight)
        own._like = weight.detach().new_empty(0)
        check_tensors(tensors, shape, format, input)
        for name, tensor in tensors.items():
            letters = dims_of(name, format)
            device = tensor.device if weight.is_meta else weight.device
            boxed = shape.box(tensor.to(device), letters)
            # A tensor of inference mode counts no versions, and a later write would go unseen.
            with torch.inference_mode(mode=False):
                boxed = boxed.clone() if boxed.is_inference() else boxed
                param = nn.Parameter(boxed, requires_grad=False)
            own.register_parameter(name, shard_param(param, shape.spec(letters)))
        if layer.bias is not None:
            bias = cast("nn.Parameter", layer.bias)
            record = sharding_of(bias)
            own.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
            shard_param(own.bias, record.spec, partial_grad=record.partial_grad)
        return own.train(layer.training)

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's codes and scales by name, as `from_layer` takes them."""
        params = {name: getattr(self, name) for name in CODES}
        found = {name: param.detach() for name, param in params.items() if param is not None}
        return {name: self._flat(name, tensor) for name, tensor in found.items()}

    def _flat(self, name: str, tensor: Tensor) -> Tensor:
        return self.shape.unbox(tensor, dims_of(name, self.format))

    def _own(self, name: str) -> Tensor | None:
        param = getattr(self, name)
        return None if param is None else self._flat(name, param)

    @property
    def quantized_weight(self) -> QuantizedWeight:
        """This rank's codes and scales; the tensors share memory with the layer's."""
        return QuantizedWeight(
            data=self._flat("weight_data", self.weight_data),
            scale=self._flat("weight_scale", self.weight_scale),
            zero=self._own("weight_zero"),
            format=self.format,
            columns=self.shape.columns,
            level=self.weight_level,
        )

    @property
    def quantized_matrix(self) -> QuantizedMatrix:
        """This rank's weight with its input scale and low-rank product."""
        down, up = self._own("low_rank_down"), self._own("low_rank_up")
        return QuantizedMatrix(
            weight=self.quantized_weight,
            input_scale=self._own("input_scale"),
            low_rank=None if down is None or up is None else (down, up),
        )

    @property
    def weight(self) -> Tensor:
        """This rank's dequantised weight, a new tensor in the dtype of the layer.

        Shape:
            [*outputs, *inputs].
        """
        whole = self.quantized_matrix.dequantize().to(self._like.dtype)
        return whole.view(*self.shape.outputs, *self.shape.inputs)

    def forward(self, x: Tensor, weight: Tensor | None = None, *, with_bias: bool = True) -> Tensor:
        """Apply the layer; see the class for shapes.

        Args:
            x: The input.
            weight: A weight in full precision to use instead of the layer's own.
            with_bias: Whether to add the bias; otherwise the caller adds it.
        """
        shape = self.shape
        x = shape.enter(_as_autocast(x))
        rows = x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 1 else x[None]
        y = (
            self._multiply(rows)
            if weight is None
            else F.linear(rows, weight.flatten(0, len(shape.outputs) - 1).flatten(1))
        )
        y = shape.leave(y if x.dim() == 2 else y.view(*x.shape[:-1], shape.rows))
        bias = self.bias if with_bias else None
        if bias is not None:
            y = y + (bias if bias.dim() == 1 else bias.flatten()).to(y.dtype)
        return y.unflatten(-1, shape.outputs) if len(shape.outputs) > 1 else y

    def _multiply(self, x: Tensor) -> Tensor:
        # Packed weights are made again when a tensor was written or replaced. A compiled graph
        # can't read version counters: there only `load_state_dict` and `to` have this effect.
        if not torch.compiler.is_compiling():
            versions = tuple(_version(p) for p in self._parameters.values() if p is not None)
            if versions != self._versions:
                self._forget()
                self._versions = versions
        if self._matrix is None:
            with torch.no_grad():
                self._matrix = self.quantized_matrix  # views of the parameters
        matrix = self._matrix
        if matrix.input_scale is not None:
            x = x * matrix.input_scale.to(x.dtype)
        group = self.shape.group if self.shape.split == "inputs" else None
        operands = Operands(
            x=x, weight=matrix.weight, input=self.input, step=self.input_step, group=group
        )
        # Kernels have no gradient, and rounding must pass it, so a function of its own defines it.
        if torch.is_grad_enabled() and x.requires_grad:
            y = cast(Tensor, _Product.apply(x, self, operands))
        else:
            y = self._product(operands)
        if matrix.low_rank is not None:
            down, up = (part.to(x.dtype) for part in matrix.low_rank)
            y = y + F.linear(F.linear(x, down), up)
        return y

    def _product(self, operands: Operands) -> Tensor:
        x, weight, rows = operands.x, operands.weight, len(operands.x)
        product = self.selector.find(x, weight, self.input, key=rows).function
        if product not in self._prepared:
            self._prepared[product] = product.prepare(weight)
        operands.prepared = self._prepared[product]
        return product.run(operands)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002 - torch's own
        """Apply a conversion, but keep the dtypes of scales, which belong to the codes."""
        # torch casts every floating parameter; a cast scale would change the values of all codes.
        kept = {name: getattr(self, name) for name in _KEPT}
        dtypes = {name: param.dtype for name, param in kept.items() if param is not None}
        before = {name: kept[name].detach() for name in dtypes}
        super()._apply(fn, recurse)
        for name, dtype in dtypes.items():
            param = getattr(self, name)
            if param.dtype != dtype:
                param.data = before[name].to(param.device)
        self._forget()
        return self

    def check_weight(self, weight: Tensor, name: str = "weight") -> None:
        """Raise QuantizationError unless `round_weight` can round a weight of this name."""
        wanted = (*self.shape.outputs, *self.shape.inputs)
        if tuple(weight.shape) != wanted:
            raise QuantizationError(f"{name} has the shape {tuple(weight.shape)}, not {wanted}")
        parts = ("input_scale", "input_step", "low_rank_down")
        made = [name for name in parts if getattr(self, name) is not None]
        if made:
            raise QuantizationError(
                f"{name}: its layer has {', '.join(made)}, which calibration data made for another "
                "weight; quantise the model anew, or by a recipe that needs no data"
            )

    @torch.no_grad()
    def round_weight(self, weight: Tensor) -> None:
        """Replace the weight by another one, rounded to the nearest values of the format.

        An all-gather where ranks split the weight.

        Args:
            weight: This rank's part of the weight, in full precision.

        Shape:
            weight: [*outputs, *inputs].

        Raises:
            QuantizationError: The shape doesn't fit, the layer has more than a rounded weight, or
                the weight is not finite.
        """
        self.check_weight(weight)
        whole = self.shape.gathered(weight.to(self._like.device))
        matrix = QuantizedMatrix(weight=quantize_weight(whole, self.format))
        for name, x in tensors_of(matrix, self.shape, self._like.dtype).items():
            param = cast("nn.Parameter", getattr(self, name))
            param.copy_(x.view_as(param))

    def _forget(self) -> None:
        """Drop the views and packed weights that products read."""
        self._prepared, self._matrix = {}, None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_prepared": {}, "_matrix": None}

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride] - all passed on
        self, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        """Refuse codes without their scales, even with `strict=False`."""
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
        self._forget()

    def extra_repr(self) -> str:
        """Return the sizes and formats that torch prints."""
        shape = self.shape
        return (
            f"outputs={shape.outputs}, inputs={shape.inputs}, split={shape.split}, "
            f"weight={self.format}, input={self.input}, "
            f"bias={self.bias is not None}, kernel={self.selector.name!r}"
        )


class _Product(torch.autograd.Function):
    """A product whose backward ignores the rounding of its input (straight-through)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear, operands: Operands) -> Tensor:
        ctx.layer = layer
        return layer._product(operands)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        weight = ctx.layer.quantized_weight.dequantize(grads[0].dtype)
        return grads[0] @ weight, None, None


def _version(param: Tensor) -> tuple[int, int | None]:
    """Return a value that changes when a parameter is written, or gets new storage."""
    return param.data_ptr(), None if param.is_inference() else param._version


def _as_autocast(x: Tensor) -> Tensor:
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def dims_of(name: str, format: WeightFormat) -> str:
    """Return the letters of a state tensor's dims; see `LinearShape.box`."""
    dims = {"weight_data": "oi"}
    dims |= dict.fromkeys(("weight_scale", "weight_zero"), format.scale_dims)
    dims |= {"weight_level": "11", "input_scale": "i", "low_rank_down": "ri", "low_rank_up": "or"}
    return (dims | {"input_step": "11"})[name]


def tensors_of(
    matrix: QuantizedMatrix, shape: LinearShape, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return this rank's part of a quantised matrix, by name of the state's tensors.

    Args:
        matrix: The quantised whole weight.
        shape: Shape of this rank's weight.
        dtype: Dtype of the parts in full precision.

    Raises:
        QuantizationError: This rank's inputs cut groups that share a scale.
    """
    matrix = matrix.take(*shape.own(matrix.weight.data.device))
    weight, down, up = matrix.weight, *(matrix.low_rank or (None, None))
    found: dict[str, Tensor | None] = {
        "weight_data": weight.data,
        "weight_scale": weight.scale,
        "weight_zero": weight.zero,
        "weight_level": weight.level,
        "input_scale": None if matrix.input_scale is None else matrix.input_scale.float(),
        "low_rank_down": None if down is None else down.to(dtype),
        "low_rank_up": None if up is None else up.to(dtype),
    }
    return {name: x.contiguous() for name, x in found.items() if x is not None}


def check_tensors(
    tensors: Mapping[str, Tensor],
    shape: LinearShape,
    format: WeightFormat,
    input: InputFormat | None,
) -> None:
    """Refuse codes without their scales, or with the wrong shape."""
    needed = {"weight_data", "weight_scale"}
    needed |= set() if format.symmetric else {"weight_zero"}
    needed |= {"weight_level"} if format.type == "nvfp4" else set()
    needed |= {"input_step"} if input is not None and not input.dynamic else set()
    missing, unknown = sorted(needed - set(tensors)), sorted(set(tensors) - set(CODES))
    if missing or unknown:
        raise QuantizationError(
            f"{format} codes need {', '.join(sorted(needed))}; missing: "
            f"{', '.join(missing) or 'none'}, unknown: {', '.join(unknown) or 'none'}"
        )
    like = QuantizedWeight.empty(shape.rows, shape.columns, format, device=torch.device("meta"))
    scales = tuple(like.scale.shape)
    sizes = {"weight_data": tuple(like.data.shape), "weight_scale": scales, "weight_zero": scales}
    for name, size in sizes.items():
        if name in tensors and tuple(tensors[name].shape) != size:
            raise QuantizationError(
                f"{name} of {format} for {shape.rows} outputs and {shape.columns} inputs has the "
                f"shape {size}, got {tuple(tensors[name].shape)}"
            )
