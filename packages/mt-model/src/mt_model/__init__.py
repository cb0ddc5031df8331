"""Transformer models as a typed list of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_model.choice import (
    Activation,
    AttentionKernel,
    KernelSet,
    Norms,
    Positions,
    QKNorm,
    Recompute,
    Sinks,
)
from mt_model.config import ModelConfig, validate_context, validate_split
from mt_model.cross_attention_config import CrossAttentionConfig
from mt_model.encoder_decoders import encoder_decoder_layers
from mt_model.gated_delta_net_config import GatedDeltaNetConfig
from mt_model.image_encoders import VISION_PRESETS, vision_preset, vit
from mt_model.image_input_config import ImageInputConfig, expand_image_tokens
from mt_model.kernel_words import Kernels
from mt_model.kinds import AttentionConfig, MLPConfig
from mt_model.mamba2_config import Mamba2Config
from mt_model.mla_config import MLAConfig
from mt_model.moe_config import MoEConfig
from mt_model.mtp_config import MTPConfig
from mt_model.norm_config import NormConfig
from mt_model.pooled_head_config import PooledHeadConfig
from mt_model.pooling_config import (
    AttentionPoolingConfig,
    ClassPoolingConfig,
    MeanPoolingConfig,
    PoolingConfig,
)
from mt_model.presets import gpt, gpt_arguments
from mt_model.recompute_plan import OffloadConfig, RecomputePlan, RecomputeRule
from mt_model.rope import RopeConfig, Rotary
from mt_model.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongropeScaling,
    RopeScaling,
    YarnScaling,
)
from mt_model.score_bias import AlibiConfig, RelativeConfig, ScoreBias
from mt_model.shapes import PRESETS, preset
from mt_model.stack_config import (
    EntryConfig,
    FeedForwardConfig,
    LayerConfig,
    MixerConfig,
    StackConfig,
)
from mt_model.temperature_config import TemperatureConfig
from mt_model.vision_config import VisionConfig

if TYPE_CHECKING:
    from mt_model.activation_memory import expected_bytes
    from mt_model.activation_table import kept_by_module, without_data
    from mt_model.allocator import keep_freed_memory
    from mt_model.cache import KVCache
    from mt_model.decoder import GPT
    from mt_model.decoding import GraphedDecoding
    from mt_model.dtype import DTYPES
    from mt_model.encoder_decoder import EncoderDecoder
    from mt_model.hugging_face.checkpoint import export_checkpoint, import_pretrained
    from mt_model.hugging_face.description import Description, describe_pretrained
    from mt_model.hugging_face.error import ExchangeError
    from mt_model.hugging_face.family import Family
    from mt_model.hugging_face.folder import Pretrained, open_pretrained
    from mt_model.hugging_face.link import Link
    from mt_model.hugging_face.loading import from_pretrained
    from mt_model.hugging_face.registry import find_family, known_families
    from mt_model.hugging_face.saving import save_pretrained
    from mt_model.initialization import initializer
    from mt_model.kernels import KernelChoice, KernelError
    from mt_model.kv_calibration import calibrate_kv_cache, kv_formats
    from mt_model.lora import export_lora
    from mt_model.losses import Losses
    from mt_model.routers import balance_experts, expert_loads, saved_buffers
    from mt_model.saved_activations import KeptBytes
    from mt_model.shared_input import SharedInput
    from mt_model.stack import Stack
    from mt_model.stage_graph import GraphOptions, graph_stage
    from mt_model.upcycling import Upcycling, upcycle_checkpoint
    from mt_model.vision import VisionEncoder

__all__ = [
    "DTYPES",
    "GPT",
    "PRESETS",
    "VISION_PRESETS",
    "Activation",
    "AlibiConfig",
    "AttentionConfig",
    "AttentionKernel",
    "AttentionPoolingConfig",
    "ClassPoolingConfig",
    "CrossAttentionConfig",
    "Description",
    "DynamicScaling",
    "EncoderDecoder",
    "EntryConfig",
    "ExchangeError",
    "Family",
    "FeedForwardConfig",
    "GatedDeltaNetConfig",
    "GraphOptions",
    "GraphedDecoding",
    "ImageInputConfig",
    "KVCache",
    "KeptBytes",
    "KernelChoice",
    "KernelError",
    "KernelSet",
    "Kernels",
    "LayerConfig",
    "LinearScaling",
    "Link",
    "Llama3Scaling",
    "LongropeScaling",
    "Losses",
    "MLAConfig",
    "MLPConfig",
    "MTPConfig",
    "Mamba2Config",
    "MeanPoolingConfig",
    "MixerConfig",
    "MoEConfig",
    "ModelConfig",
    "NormConfig",
    "Norms",
    "OffloadConfig",
    "PooledHeadConfig",
    "PoolingConfig",
    "Positions",
    "Pretrained",
    "QKNorm",
    "Recompute",
    "RecomputePlan",
    "RecomputeRule",
    "RelativeConfig",
    "RopeConfig",
    "RopeScaling",
    "Rotary",
    "ScoreBias",
    "SharedInput",
    "Sinks",
    "Stack",
    "StackConfig",
    "TemperatureConfig",
    "Upcycling",
    "VisionConfig",
    "VisionEncoder",
    "YarnScaling",
    "balance_experts",
    "calibrate_kv_cache",
    "describe_pretrained",
    "encoder_decoder_layers",
    "expand_image_tokens",
    "expected_bytes",
    "expert_loads",
    "export_checkpoint",
    "export_lora",
    "find_family",
    "from_pretrained",
    "gpt",
    "gpt_arguments",
    "graph_stage",
    "import_pretrained",
    "initializer",
    "keep_freed_memory",
    "kept_by_module",
    "known_families",
    "kv_formats",
    "open_pretrained",
    "preset",
    "save_pretrained",
    "saved_buffers",
    "upcycle_checkpoint",
    "validate_context",
    "validate_split",
    "vision_preset",
    "vit",
    "without_data",
]

# What needs torch is resolved at first use: a configuration is checked without it.
__getattr__ = resolve_later(
    __name__,
    activation_memory="expected_bytes",
    activation_table="kept_by_module without_data",
    allocator="keep_freed_memory",
    cache="KVCache",
    decoder="GPT",
    decoding="GraphedDecoding",
    dtype="DTYPES",
    encoder_decoder="EncoderDecoder",
    initialization="initializer",
    kernels="KernelChoice KernelError",
    kv_calibration="calibrate_kv_cache kv_formats",
    lora="export_lora",
    losses="Losses",
    **{
        "hugging_face.checkpoint": "export_checkpoint import_pretrained",
        "hugging_face.description": "Description describe_pretrained",
        "hugging_face.error": "ExchangeError",
        "hugging_face.family": "Family",
        "hugging_face.folder": "Pretrained open_pretrained",
        "hugging_face.link": "Link",
        "hugging_face.loading": "from_pretrained",
        "hugging_face.registry": "find_family known_families",
        "hugging_face.saving": "save_pretrained",
    },
    routers="balance_experts expert_loads saved_buffers",
    saved_activations="KeptBytes",
    shared_input="SharedInput",
    stack="Stack",
    stage_graph="GraphOptions graph_stage",
    upcycling="Upcycling upcycle_checkpoint",
    vision="VisionEncoder",
)
