"""FP8 and FP4 values, quantisers and recipes, with the same bits on a CPU and a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_fp8.delayed import DelayedScales as DelayedScales
from mt_fp8.delayed import end_step as end_step
from mt_fp8.linear import QuantizedLinear as QuantizedLinear
from mt_fp8.linear import convert_linears as convert_linears
from mt_fp8.linear import update_scales as update_scales
from mt_fp8.matmul import matmul as matmul
from mt_fp8.operand import Operand as Operand
from mt_fp8.primary import PrimaryWeights as PrimaryWeights
from mt_fp8.products import Products as Products
from mt_fp8.products import Split as Split
from mt_fp8.qtensor import QTensor as QTensor
from mt_fp8.quantize import quantize as quantize
from mt_fp8.recipe import Recipe as Recipe
from mt_fp8.recipe import recipe as recipe
from mt_fp8.scaling import Scaling as Scaling

if not TYPE_CHECKING:
    __getattr__ = resolve_later(__name__)
