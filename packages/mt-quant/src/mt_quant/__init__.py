"""Low-bit weights and activations for linear layers, whole or split over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_quant.error import CalibrationError, QuantizationError
from mt_quant.formats.format import InputFormat, WeightFormat
from mt_quant.formats.kv_format import KVFormat
from mt_quant.formats.weight import QuantizedWeight, quantize_weight
from mt_quant.layers.linear import QuantizedLinear
from mt_quant.layers.shape import LinearShape

if TYPE_CHECKING:
    from mt_quant.calibration.kv_cache import KVCalibrator, KVScales, KVScheme
    from mt_quant.calibration.statistics import Statistics
    from mt_quant.checkpoints.installation import compressed_state, install, stored_layer
    from mt_quant.checkpoints.kv_layout import (
        KV_LEAVES,
        common_kv_format,
        kv_format_of,
        read_kv_scales,
        write_kv_scales,
    )
    from mt_quant.checkpoints.layout import Layout
    from mt_quant.checkpoints.stored import StoredLinear, join_rows
    from mt_quant.checkpoints.writing import LayoutWriter
    from mt_quant.layers.shared_input import SharedInput
    from mt_quant.methods.awq import awq
    from mt_quant.methods.gptq import gptq
    from mt_quant.methods.output_error import output_error
    from mt_quant.methods.registry import rtn
    from mt_quant.methods.smoothquant import smoothquant
    from mt_quant.methods.svdquant import svdquant
    from mt_quant.models.folding import fold_scales
    from mt_quant.models.input_scales import fold_input_scales
    from mt_quant.models.loading import load_quantized
    from mt_quant.models.quantize import Progress, quantize
    from mt_quant.models.sensitivity import choose_formats, measure_costs
    from mt_quant.models.sizes import ModelSizes
    from mt_quant.rules.config import QuantizationConfig
    from mt_quant.rules.recipes import RECIPES
    from mt_quant.rules.rule import Decision, Rule, ShapeCondition
    from mt_quant.training.fake_quantization import FakeQuantizer, training_obstacle

__all__ = [
    "KV_LEAVES",
    "RECIPES",
    "CalibrationError",
    "Decision",
    "FakeQuantizer",
    "InputFormat",
    "KVCalibrator",
    "KVFormat",
    "KVScales",
    "KVScheme",
    "Layout",
    "LayoutWriter",
    "LinearShape",
    "ModelSizes",
    "Progress",
    "QuantizationConfig",
    "QuantizationError",
    "QuantizedLinear",
    "QuantizedWeight",
    "Rule",
    "ShapeCondition",
    "SharedInput",
    "Statistics",
    "StoredLinear",
    "WeightFormat",
    "awq",
    "choose_formats",
    "common_kv_format",
    "compressed_state",
    "fold_input_scales",
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
    "rtn",
    "smoothquant",
    "stored_layer",
    "svdquant",
    "training_obstacle",
    "write_kv_scales",
]

# Imported at first use: a program needs few of these, and each costs time to import.
__getattr__ = resolve_later(__name__)
