"""Transformer models as a typed list of layers."""

from mt_model.config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, NormConfig
from mt_model.flops import flops_per_token, num_parameters
from mt_model.presets import PRESETS, gpt, preset

__all__ = [
    "PRESETS",
    "AttentionConfig",
    "LayerConfig",
    "MLPConfig",
    "ModelConfig",
    "NormConfig",
    "flops_per_token",
    "gpt",
    "num_parameters",
    "preset",
]
