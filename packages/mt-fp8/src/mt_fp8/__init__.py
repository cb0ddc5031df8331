"""FP8 and FP4 values, quantisers and recipes, with the same bits on a CPU and a GPU."""

from __future__ import annotations

from mt_fp8.delayed import DelayedScales, end_step
from mt_fp8.linear import QuantizedLinear, convert_linears, update_scales
from mt_fp8.matmul import matmul
from mt_fp8.operand import Operand
from mt_fp8.primary import PrimaryWeights
from mt_fp8.products import Products, Split
from mt_fp8.qtensor import QTensor
from mt_fp8.quantize import quantize
from mt_fp8.recipe import Recipe, recipe
from mt_fp8.scaling import Scaling

__all__ = [
    "DelayedScales",
    "Operand",
    "PrimaryWeights",
    "Products",
    "QTensor",
    "QuantizedLinear",
    "Recipe",
    "Scaling",
    "Split",
    "convert_linears",
    "end_step",
    "matmul",
    "quantize",
    "recipe",
    "update_scales",
]
