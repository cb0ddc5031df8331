"""Transformer models as a typed list of layers."""

from mt_model.allocator import keep_freed_memory
from mt_model.cache import KVCache
from mt_model.config import (
    AttentionConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    NormConfig,
    validate_split,
)
from mt_model.dtype import DTYPES
from mt_model.flops import flops_per_token, num_parameters
from mt_model.gpt import GPT, LossOutput
from mt_model.lora import export_lora
from mt_model.presets import PRESETS, gpt, preset
from mt_model.recomputation import Recompute

__all__ = [
    "DTYPES",
    "GPT",
    "PRESETS",
    "AttentionConfig",
    "KVCache",
    "LayerConfig",
    "LossOutput",
    "MLPConfig",
    "ModelConfig",
    "NormConfig",
    "Recompute",
    "export_lora",
    "flops_per_token",
    "gpt",
    "keep_freed_memory",
    "num_parameters",
    "preset",
    "validate_split",
]
