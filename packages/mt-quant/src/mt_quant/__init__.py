"""Low-bit weights and activations for linear layers, whole or split over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_quant.calibration.kv_cache import KVCalibrator, KVScales, KVScheme
from mt_quant.calibration.magnitudes import RANGES, Magnitudes, find_range
from mt_quant.calibration.statistics import Statistics
from mt_quant.error import CalibrationError, QuantizationError
from mt_quant.formats.activation import round_activation
from mt_quant.formats.format import InputFormat, WeightFormat
from mt_quant.formats.grid import Grid, find_grid, round_to_grid
from mt_quant.formats.kv_format import KVFormat
from mt_quant.formats.weight import QuantizedMatrix, QuantizedWeight, encode, quantize_weight
from mt_quant.layers.linear import QuantizedLinear
from mt_quant.layers.matmul import MATMULS, Matmul, Operands
from mt_quant.layers.shape import LinearShape, SplitLinear
from mt_quant.methods.awq import awq, awq_scale, clipped_grid
from mt_quant.methods.gptq import gptq
from mt_quant.methods.output_error import output_error
from mt_quant.methods.registry import METHODS, Method, rtn
from mt_quant.methods.smoothquant import smoothquant, smoothquant_scale
from mt_quant.methods.svdquant import svdquant
from mt_quant.models.quantize import Progress, quantize
from mt_quant.rules.config import QuantizationConfig
from mt_quant.rules.recipes import RECIPES
from mt_quant.rules.rule import Decision, Rule, ShapeCondition

if TYPE_CHECKING:
    from mt_quant.checkpoints.compressed import describe_compressed, write_compressed
    from mt_quant.checkpoints.installation import compressed_state, install, stored_layer
    from mt_quant.checkpoints.kv_layout import (
        KV_LEAVES,
        common_kv_format,
        kv_format_of,
        read_kv_scales,
        write_kv_scales,
    )
    from mt_quant.checkpoints.layout import LAYOUTS, Layout
    from mt_quant.checkpoints.stored import StoredLinear, join_rows
    from mt_quant.checkpoints.writing import WRITERS, LayoutWriter
    from mt_quant.distillation import distillation_loss
    from mt_quant.models.folding import SharedInput, fold_scales
    from mt_quant.models.input_scales import fold_input_scales
    from mt_quant.models.loading import load_quantized
    from mt_quant.models.sensitivity import (
        Costs,
        FormatPlan,
        choose_formats,
        measure_costs,
        weight_bits,
    )
    from mt_quant.models.sizes import ModelSizes
    from mt_quant.training.fake_quantization import FakeQuantizer, training_obstacle

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
    "FakeQuantizer",
    "FormatPlan",
    "Grid",
    "InputFormat",
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
    "ModelSizes",
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
    "round_activation",
    "round_to_grid",
    "rtn",
    "smoothquant",
    "smoothquant_scale",
    "stored_layer",
    "svdquant",
    "training_obstacle",
    "weight_bits",
    "write_compressed",
    "write_kv_scales",
]

# Imported at first use: a program needs few of these, and each costs time to import.
__getattr__ = resolve_later(
    __name__,
    **{
        "checkpoints.compressed": "describe_compressed write_compressed",
        "checkpoints.installation": "compressed_state install stored_layer",
        "checkpoints.kv_layout": (
            "KV_LEAVES common_kv_format kv_format_of read_kv_scales write_kv_scales"
        ),
        "checkpoints.layout": "LAYOUTS Layout",
        "checkpoints.stored": "StoredLinear join_rows",
        "checkpoints.writing": "WRITERS LayoutWriter",
        "distillation": "distillation_loss",
        "models.folding": "SharedInput fold_scales",
        "models.input_scales": "fold_input_scales",
        "models.loading": "load_quantized",
        "models.sizes": "ModelSizes",
        "models.sensitivity": "Costs FormatPlan choose_formats measure_costs weight_bits",
        "training.fake_quantization": "FakeQuantizer training_obstacle",
    },
)
