"""FP8 and FP4 values, quantisers and recipes, with the same bits on a CPU and a GPU."""

from __future__ import annotations

from mt_fp8.delayed import DelayedState
from mt_fp8.qtensor import QTensor
from mt_fp8.quantize import Both, amax_of, quantize, quantize_both
from mt_fp8.recipe import Recipe, recipe
from mt_fp8.scaling import Scaling

__all__ = [
    "Both",
    "DelayedState",
    "QTensor",
    "Recipe",
    "Scaling",
    "amax_of",
    "quantize",
    "quantize_both",
    "recipe",
]
