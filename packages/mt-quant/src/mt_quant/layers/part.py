"""One rank's part of a weight as codes, with the bits that the whole weight gives."""

from __future__ import annotations

from torch import Tensor

from mt_quant.error import QuantizationError
from mt_quant.formats.format import WeightFormat
from mt_quant.formats.weight import QuantizedWeight, quantize_weight
from mt_quant.layers.shape import LinearShape


def quantize_part(weight: Tensor, format: WeightFormat, shape: LinearShape) -> QuantizedWeight:
    """Round this rank's part of a weight, with the codes that one rank gives to the whole weight.

    An all-gather of the weight where ranks split numbers that share a scale.

    Args:
        weight: This rank's part.
        format: Number format.
        shape: Sizes and split of the weight.

    Shape:
        weight: [*outputs, *inputs] or [out, in].

    Raises:
        QuantizationError: The format does not fit this rank's inputs, or the weight is not finite.
    """
    check_part(format, shape)
    if not spans_ranks(format, shape):
        return quantize_weight(weight.reshape(shape.rows, shape.columns), format)
    whole = shape.gathered(weight.reshape(*shape.outputs, *shape.inputs))
    return quantize_weight(whole, format).take(*shape.own(weight.device))


def check_part(format: WeightFormat, shape: LinearShape) -> None:
    """Raise QuantizationError unless a rank has whole groups of inputs, and whole bytes."""
    format.group_size(shape.run)
    if format.bits == 4 and shape.run % 2:
        raise QuantizationError(
            f"{shape.run} inputs in a row can't be stored two to a byte ({format}); use int8"
        )


def spans_ranks(format: WeightFormat, shape: LinearShape) -> bool:
    """Return whether numbers that share a scale lie on several ranks."""
    if shape.split is None:
        return False
    if format.type == "nvfp4" or format.group == "tensor":
        return True
    return shape.split == "inputs" and not isinstance(format.group, int)
