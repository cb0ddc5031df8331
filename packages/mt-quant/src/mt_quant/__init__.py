"""Low-bit weights and activations for linear layers, whole or split over ranks."""

from __future__ import annotations

from mt_quant.awq import awq, awq_scale, clipped_grid
from mt_quant.calibration import RANGES, Magnitudes, find_range
from mt_quant.config import Explanation, QuantizationConfig
from mt_quant.distillation import distillation_loss
from mt_quant.error import CalibrationError, QuantizationError
from mt_quant.folding import InputSource, SharedInput, fold_scale, fold_scales
from mt_quant.format import InputFormat, WeightFormat
from mt_quant.gptq import gptq
from mt_quant.grid import Grid, find_grid, round_to_grid
from mt_quant.hessian import output_error
from mt_quant.kv_cache import KVCalibrator, KVScales
from mt_quant.linear import QuantizedLinear
from mt_quant.loading import load_quantized
from mt_quant.matmul import MATMULS, Matmul, Operands
from mt_quant.method import METHODS, Method, rtn
from mt_quant.quantize import Progress, quantize
from mt_quant.recipes import RECIPES
from mt_quant.rule import Decision, Rule, ShapeCondition
from mt_quant.sensitivity import Costs, FormatPlan, choose_formats, measure_costs, weight_bits
from mt_quant.shape import LinearShape, SplitLinear
from mt_quant.smoothquant import smoothquant, smoothquant_scale
from mt_quant.statistics import Statistics
from mt_quant.svdquant import svdquant
from mt_quant.weight import QuantizedMatrix, QuantizedWeight, encode, quantize_weight

__all__ = [
    "MATMULS",
    "METHODS",
    "RANGES",
    "RECIPES",
    "CalibrationError",
    "Costs",
    "Decision",
    "Explanation",
    "FormatPlan",
    "Grid",
    "InputFormat",
    "InputSource",
    "KVCalibrator",
    "KVScales",
    "LinearShape",
    "Magnitudes",
    "Matmul",
    "Method",
    "Operands",
    "Progress",
    "QuantizationConfig",
    "QuantizationError",
    "QuantizedLinear",
    "QuantizedMatrix",
    "QuantizedWeight",
    "Rule",
    "ShapeCondition",
    "SharedInput",
    "SplitLinear",
    "Statistics",
    "WeightFormat",
    "awq",
    "awq_scale",
    "choose_formats",
    "clipped_grid",
    "distillation_loss",
    "encode",
    "find_grid",
    "find_range",
    "fold_scale",
    "fold_scales",
    "gptq",
    "load_quantized",
    "measure_costs",
    "output_error",
    "quantize",
    "quantize_weight",
    "round_to_grid",
    "rtn",
    "smoothquant",
    "smoothquant_scale",
    "svdquant",
    "weight_bits",
]
