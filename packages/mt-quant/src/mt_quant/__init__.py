"""Low-bit weights and activations for linear layers, whole or split over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_quant.error import CalibrationError as CalibrationError
from mt_quant.error import QuantizationError as QuantizationError
from mt_quant.formats.format import InputFormat as InputFormat
from mt_quant.formats.format import WeightFormat as WeightFormat
from mt_quant.formats.kv_format import KVFormat as KVFormat
from mt_quant.formats.weight import QuantizedWeight as QuantizedWeight
from mt_quant.formats.weight import quantize_weight as quantize_weight
from mt_quant.layers.linear import QuantizedLinear as QuantizedLinear
from mt_quant.layers.shape import LinearShape as LinearShape

if TYPE_CHECKING:
    from mt_quant.calibration.kv_cache import KVCalibrator as KVCalibrator
    from mt_quant.calibration.kv_cache import KVScales as KVScales
    from mt_quant.calibration.kv_cache import KVScheme as KVScheme
    from mt_quant.calibration.statistics import Statistics as Statistics
    from mt_quant.checkpoints.installation import compressed_state as compressed_state
    from mt_quant.checkpoints.installation import install as install
    from mt_quant.checkpoints.installation import stored_layer as stored_layer
    from mt_quant.checkpoints.kv_layout import KV_LEAVES as KV_LEAVES
    from mt_quant.checkpoints.kv_layout import common_kv_format as common_kv_format
    from mt_quant.checkpoints.kv_layout import kv_format_of as kv_format_of
    from mt_quant.checkpoints.kv_layout import read_kv_scales as read_kv_scales
    from mt_quant.checkpoints.kv_layout import write_kv_scales as write_kv_scales
    from mt_quant.checkpoints.layout import Layout as Layout
    from mt_quant.checkpoints.stored import StoredLinear as StoredLinear
    from mt_quant.checkpoints.stored import join_rows as join_rows
    from mt_quant.checkpoints.writing import LayoutWriter as LayoutWriter
    from mt_quant.layers.part import check_part as check_part
    from mt_quant.layers.part import quantize_part as quantize_part
    from mt_quant.layers.shared_input import SharedInput as SharedInput
    from mt_quant.methods.awq import awq as awq
    from mt_quant.methods.gptq import gptq as gptq
    from mt_quant.methods.output_error import output_error as output_error
    from mt_quant.methods.registry import rtn as rtn
    from mt_quant.methods.smoothquant import smoothquant as smoothquant
    from mt_quant.methods.svdquant import svdquant as svdquant
    from mt_quant.models.folding import fold_scales as fold_scales
    from mt_quant.models.input_scales import fold_input_scales as fold_input_scales
    from mt_quant.models.loading import load_quantized as load_quantized
    from mt_quant.models.quantize import Progress as Progress
    from mt_quant.models.quantize import quantize as quantize
    from mt_quant.models.sensitivity import choose_formats as choose_formats
    from mt_quant.models.sensitivity import measure_costs as measure_costs
    from mt_quant.models.sizes import ModelSizes as ModelSizes
    from mt_quant.rules.config import QuantizationConfig as QuantizationConfig
    from mt_quant.rules.recipes import RECIPES as RECIPES
    from mt_quant.rules.rule import Decision as Decision
    from mt_quant.rules.rule import Rule as Rule
    from mt_quant.rules.rule import ShapeCondition as ShapeCondition
    from mt_quant.training.fake_quantization import FakeQuantizer as FakeQuantizer
    from mt_quant.training.fake_quantization import training_obstacle as training_obstacle
else:
    # Imported at first use: a program needs few of these, and each costs time to import.
    __getattr__ = resolve_later(__name__)
