"""Low-bit weights and activations for linear layers, whole or split over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_quant.activation import round_activation
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
from mt_quant.kv_cache import KVCalibrator, KVScales, KVScheme
from mt_quant.kv_format import KVFormat
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

if TYPE_CHECKING:
    from mt_quant.compressed import describe_compressed, write_compressed
    from mt_quant.installation import compressed_state, install, stored_layer
    from mt_quant.kv_layout import (
        KV_LEAVES,
        common_kv_format,
        kv_format_of,
        read_kv_scales,
        write_kv_scales,
    )
    from mt_quant.layout import LAYOUTS, Layout
    from mt_quant.stored import StoredLinear, join_rows
    from mt_quant.writing import WRITERS, LayoutWriter

__all__ = [
    "KV_LEAVES",
    "LAYOUTS",
    "MATMULS",
    "METHODS",
    "RANGES",
    "RECIPES",
    "WRITERS",
    "CalibrationError",
    "Costs",
    "Decision",
    "Explanation",
    "FormatPlan",
    "Grid",
    "InputFormat",
    "InputSource",
    "KVCalibrator",
    "KVFormat",
    "KVScales",
    "KVScheme",
    "Layout",
    "LayoutWriter",
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
    "StoredLinear",
    "WeightFormat",
    "awq",
    "awq_scale",
    "choose_formats",
    "clipped_grid",
    "common_kv_format",
    "compressed_state",
    "describe_compressed",
    "distillation_loss",
    "encode",
    "find_grid",
    "find_range",
    "fold_scale",
    "fold_scales",
    "gptq",
    "install",
    "join_rows",
    "kv_format_of",
    "load_quantized",
    "measure_costs",
    "output_error",
    "quantize",
    "quantize_weight",
    "read_kv_scales",
    "round_activation",
    "round_to_grid",
    "rtn",
    "smoothquant",
    "smoothquant_scale",
    "stored_layer",
    "svdquant",
    "weight_bits",
    "write_compressed",
    "write_kv_scales",
]

# Layouts of other software are for who reads or writes them.
__getattr__ = resolve_later(
    __name__,
    compressed="describe_compressed write_compressed",
    installation="compressed_state install stored_layer",
    kv_layout="KV_LEAVES common_kv_format kv_format_of read_kv_scales write_kv_scales",
    layout="LAYOUTS Layout",
    stored="StoredLinear join_rows",
    writing="WRITERS LayoutWriter",
)
