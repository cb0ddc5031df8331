"""Products with a weight in low precision, as candidates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from mt_files import AUTO as AUTO
from mt_files import kernel_for
from mt_parallel_state import Group
from torch import Tensor

from mt_quant.formats.activation import input_codes, input_scale_of, round_activation
from mt_quant.formats.format import InputFormat
from mt_quant.formats.weight import QuantizedWeight

# Above so many rows one product with a dequantised weight is faster on a CPU.
_FEW_ROWS = {"int8": 8, "int4": 48}
_INT4_GROUPS = (32, 64, 128, 256)


@dataclass(kw_only=True, eq=False, slots=True)
class Operands:
    """What is multiplied.

    Attributes:
        x: The activation, before rounding.
        weight: In low precision.
        input: How `x` is rounded; None leaves it.
        step: The static scale of `x`, of an `input` that is not dynamic.
        group: Ranks that split the features of `x`, whose scales are made of all.
        prepared: What `Matmul.prepare` returned for the weight.

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


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """One way to multiply by a weight in low precision.

    Attributes:
        name: In messages, and to ask for it.
        run: Returns `x @ weight.T`, [tokens, out] in the dtype of `x`.
        obstacle: Why it can't serve some operands; None where it serves.
        prepare: Makes of the weight, once, the tensors that `run` reads in place of its own.
    """

    name: str
    run: Callable[[Operands], Tensor]
    obstacle: Callable[[Operands], str | None]
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
    """Multiply by codes, which are exact in the dtype of the input, and scale the sums."""
    x, weight = _rounded(operands), operands.weight
    codes = weight.data
    if not weight.format.is_integer:
        codes = codes.view(torch.float8_e4m3fn)
    y = F.linear(x, codes.to(x.dtype))
    return (y * weight.scale.t().to(torch.float32)).to(x.dtype)


def _by_codes_obstacle(operands: Operands) -> str | None:
    format, dtype = operands.weight.format, operands.x.dtype
    if format.type not in ("int8", "fp8") or isinstance(format.group, int):
        return f"it is for 8 bits with a scale an output, and the weight is {format}"
    if not format.symmetric:
        return "its codes have no zero point"
    if dtype not in (torch.bfloat16, torch.float32, torch.float64):
        return f"sums of codes can be too large for {dtype}"
    return None


def _serves(operands: Operands) -> None:
    """Have no obstacle."""


def _cpu_obstacle(operands: Operands) -> str | None:
    """Refuse what torch's kernels for weights alone do not compute fast on a CPU."""
    x, weight = operands.x, operands.weight
    if x.device.type != "cpu":
        return f"it is for the CPU, and the input on {x.device}"
    if x.dtype != torch.bfloat16:
        return f"it is fast for bf16, and the input is {x.dtype}"
    if operands.input is not None:
        return f"the input is rounded to {operands.input}"
    if not weight.format.symmetric and weight.format.bits == 8:
        return "its codes have no zero point"
    few = _FEW_ROWS[weight.format.type]
    if x.shape[0] > few:
        return f"above {few} rows a dequantised weight is faster, and there are {x.shape[0]}"
    return None


def _torch_int8_obstacle(operands: Operands) -> str | None:
    format = operands.weight.format
    if format.type != "int8" or isinstance(format.group, int):
        return f"it is for int8 with a scale an output, and the weight is {format}"
    return _cpu_obstacle(operands)


def _torch_int8(operands: Operands) -> Tensor:
    weight = operands.weight
    return torch.ops.aten._weight_int8pack_mm(operands.x, weight.data, *operands.prepared)


def _row_scales(weight: QuantizedWeight) -> tuple[Tensor, ...]:
    return (weight.scale[:, 0].expand(weight.shape[0]).contiguous(),)


def _torch_int4_obstacle(operands: Operands) -> str | None:
    weight = operands.weight
    if weight.format.type != "int4" or weight.format.group not in _INT4_GROUPS:
        return f"it is for int4 in groups of {_INT4_GROUPS}, and the weight is {weight.format}"
    if weight.shape[0] % 16:
        return f"it is for multiples of 16 outputs, and there are {weight.shape[0]}"
    return _cpu_obstacle(operands)


def _torch_int4_pack(weight: QuantizedWeight) -> tuple[Tensor, ...]:
    """Lay out as torch wants it: codes from 0 to 15, of which 8 is zero, and added offsets."""
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


def _integers_obstacle(operands: Operands) -> str | None:
    x, weight = operands.x, operands.weight
    if operands.input is None or operands.input.type != "int8":
        return f"the input is not rounded to int8 but {operands.input}"
    if weight.format.type != "int8" or isinstance(weight.format.group, int):
        return f"it is for int8 with a scale an output, and the weight is {weight.format}"
    if not weight.format.symmetric:
        return "its codes have no zero point"
    if x.device.type == "cuda" and (x.shape[0] <= 16 or x.shape[1] % 8 or weight.shape[0] % 8):
        return "CUDA's product needs above 16 rows and multiples of 8"
    return None if x.device.type in ("cpu", "cuda") else f"the input is on {x.device}"


def _integers(operands: Operands) -> Tensor:
    """Sum products of integers exactly, in int32, and scale once."""
    x, weight = operands.x, operands.weight
    input = operands.input
    if input is None:
        raise ValueError("the input is not rounded; give `input`")
    scale = input_scale_of(x, input, step=operands.step, group=operands.group)
    total = torch.ops.aten._int_mm(input_codes(x, scale, input), weight.data.t())
    return (total.float() * scale * weight.scale.float().t()).to(x.dtype)


MATMULS: tuple[Matmul, ...] = (
    Matmul(name="integers", run=_integers, obstacle=_integers_obstacle),
    Matmul(name="torch_int8", run=_torch_int8, obstacle=_torch_int8_obstacle, prepare=_row_scales),
    Matmul(
        name="torch_int4", run=_torch_int4, obstacle=_torch_int4_obstacle, prepare=_torch_int4_pack
    ),
    Matmul(name="codes", run=_by_codes, obstacle=_by_codes_obstacle),
    Matmul(name="reference", run=_reference, obstacle=_serves),
)


def matmul_for(name: str, operands: Operands) -> Matmul:
    """Return the way of a name, or for "auto" the first that serves; see `mt_files.kernel_for`."""
    return kernel_for(MATMULS, name, operands)
