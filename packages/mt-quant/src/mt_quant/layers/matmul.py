"""Products of an activation and a quantised weight: the candidates of one registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from mt_kernels import Candidate, Registry
from mt_parallel_state import Group
from torch import Tensor

from mt_quant.formats.activation import input_codes, input_scale_of, round_activation
from mt_quant.formats.format import InputFormat
from mt_quant.formats.weight import QuantizedWeight

# With more rows, dequantising the weight and one product are faster on a CPU.
_FEW_ROWS = {"int8": 8, "int4": 48}
_INT4_GROUPS = (32, 64, 128, 256)


@dataclass(kw_only=True, eq=False, slots=True)
class Operands:
    """Operands of a product.

    Attributes:
        x: The activation, before rounding.
        weight: The quantised weight.
        input: Format to round `x` to; None leaves it.
        step: Static scale of `x`, for an `input` that is not dynamic.
        group: Ranks that split the features of `x`, whose scales cover all of them.
        prepared: Tensors that `Product.prepare` returned for the weight.

    Shape:
        x: [tokens, in]. step: [1, 1].
    """

    x: Tensor
    weight: QuantizedWeight
    input: InputFormat | None = None
    step: Tensor | None = None
    group: Group = None
    prepared: tuple[Tensor, ...] = ()


def _no_preparation(weight: QuantizedWeight) -> tuple[Tensor, ...]:
    return ()


@dataclass(frozen=True)
class Product:
    """The functions of a candidate.

    Attributes:
        run: Return `x @ weight.T`, [tokens, out] in the dtype of `x`.
        prepare: Make from the weight, once, the tensors that `run` reads instead of the weight's.
    """

    run: Callable[[Operands], Tensor]
    prepare: Callable[[QuantizedWeight], tuple[Tensor, ...]] = _no_preparation


def _reference(operands: Operands) -> Tensor:
    x = _rounded(operands)
    return F.linear(x, operands.weight.dequantize(x.dtype))


def _rounded(operands: Operands) -> Tensor:
    if operands.input is None:
        return operands.x
    step, group = operands.step, operands.group
    return round_activation(operands.x, operands.input, step=step, group=group)


def _by_codes(operands: Operands) -> Tensor:
    """Multiply by the codes, which are exact in the input's dtype, and scale the sums."""
    x, weight = _rounded(operands), operands.weight
    codes = weight.data
    if not weight.format.is_integer:
        codes = codes.view(torch.float8_e4m3fn)
    y = F.linear(x, codes.to(x.dtype))
    return (y * weight.scale.t().to(torch.float32)).to(x.dtype)


def _by_codes_obstacle(x: Tensor, weight: QuantizedWeight, input: InputFormat | None) -> str | None:
    format = weight.format
    if format.type not in ("int8", "fp8") or isinstance(format.group, int):
        return f"it is for 8 bits with a scale for each output, and the weight is {format}"
    if not format.symmetric:
        return "its codes have no zero point"
    if x.dtype not in (torch.bfloat16, torch.float32, torch.float64):
        return f"sums of codes can be too large for {x.dtype}"
    return None


def _cpu_obstacle(x: Tensor, weight: QuantizedWeight, input: InputFormat | None) -> str | None:
    """Return why torch's CPU kernels for low-bit weights can't serve, or would be slow."""
    if x.device.type != "cpu":
        return f"it is for the CPU, and the input is on {x.device}"
    if x.dtype != torch.bfloat16:
        return f"it is fast for bf16, and the input is {x.dtype}"
    if input is not None:
        return f"the input is rounded to {input}"
    if not weight.format.symmetric and weight.format.bits == 8:
        return "its codes have no zero point"
    return None


def _many_rows(x: Tensor, weight: QuantizedWeight, input: InputFormat | None) -> str | None:
    few = _FEW_ROWS[weight.format.type]
    if x.shape[0] > few:
        return f"above {few} rows a dequantised weight is faster, and there are {x.shape[0]}"
    return None


def _torch_int8_obstacle(
    x: Tensor, weight: QuantizedWeight, input: InputFormat | None
) -> str | None:
    format = weight.format
    if format.type != "int8" or isinstance(format.group, int):
        return f"it is for int8 with a scale for each output, and the weight is {format}"
    return _cpu_obstacle(x, weight, input)


def _torch_int8(operands: Operands) -> Tensor:
    weight = operands.weight
    return torch.ops.aten._weight_int8pack_mm(operands.x, weight.data, *operands.prepared)


def _row_scales(weight: QuantizedWeight) -> tuple[Tensor, ...]:
    return (weight.scale[:, 0].expand(weight.shape[0]).contiguous(),)


def _torch_int4_obstacle(
    x: Tensor, weight: QuantizedWeight, input: InputFormat | None
) -> str | None:
    if weight.format.type != "int4" or weight.format.group not in _INT4_GROUPS:
        return f"it is for int4 in groups of {_INT4_GROUPS}, and the weight is {weight.format}"
    if weight.shape[0] % 16:
        return f"it is for multiples of 16 outputs, and there are {weight.shape[0]}"
    return _cpu_obstacle(x, weight, input)


def _torch_int4_pack(weight: QuantizedWeight) -> tuple[Tensor, ...]:
    """Return torch's layout: codes from 0 to 15, where 8 stands for zero, and added offsets."""
    codes = weight.codes().to(torch.int32)
    codes = codes + 8 if weight.format.symmetric else codes
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    offset = torch.zeros_like(weight.scale)
    if weight.zero is not None:
        offset = (8 - weight.zero.float()) * weight.scale.float()
    both = torch.stack((weight.scale.float(), offset.float()), dim=-1)
    return packed, both.transpose(0, 1).contiguous().to(torch.bfloat16)


def _torch_int4(operands: Operands) -> Tensor:
    packed, scales = operands.prepared
    group = cast(int, operands.weight.format.group)
    return torch.ops.aten._weight_int4pack_mm_for_cpu(operands.x, packed, group, scales)


def _integers_obstacle(x: Tensor, weight: QuantizedWeight, input: InputFormat | None) -> str | None:
    if input is None or input.type != "int8":
        return f"the input is not rounded to int8 but {input}"
    if weight.format.type != "int8" or isinstance(weight.format.group, int):
        return f"it is for int8 with a scale for each output, and the weight is {weight.format}"
    if not weight.format.symmetric:
        return "its codes have no zero point"
    if x.device.type == "cuda" and (x.shape[0] <= 16 or x.shape[1] % 8 or weight.shape[0] % 8):
        return "CUDA's product needs above 16 rows and multiples of 8"
    return None if x.device.type in ("cpu", "cuda") else f"the input is on {x.device}"


def _integers(operands: Operands) -> Tensor:
    """Sum products of integers exactly in int32, and scale the sums once."""
    x, weight = operands.x, operands.weight
    input = operands.input
    if input is None:
        raise ValueError("the input is not rounded; give `input`")
    scale = input_scale_of(x, input, step=operands.step, group=operands.group)
    total = torch.ops.aten._int_mm(input_codes(x, scale, input), weight.data.t())
    return (total.float() * scale * weight.scale.float().t()).to(x.dtype)


MATMULS: Registry[Product] = Registry(
    "quantized_matmul",
    (
        Candidate("integers", Product(_integers), _integers_obstacle),
        Candidate(
            "torch_int8", Product(_torch_int8, _row_scales), _torch_int8_obstacle, _many_rows
        ),
        Candidate(
            "torch_int4", Product(_torch_int4, _torch_int4_pack), _torch_int4_obstacle, _many_rows
        ),
        Candidate("codes", Product(_by_codes), _by_codes_obstacle),
        Candidate("reference", Product(_reference)),
    ),
)
"""Products with a quantised weight; obstacles take the input, the weight and the input's format."""
