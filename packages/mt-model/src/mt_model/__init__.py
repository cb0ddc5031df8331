"""Transformer models as a typed list of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_model.attend.score_bias import AlibiConfig, RelativeConfig, ScoreBias
from mt_model.attention.config import AttentionConfig
from mt_model.attention.cross_attention_config import CrossAttentionConfig
from mt_model.attention.mla_config import MLAConfig, score_scale
from mt_model.block.entry import EntryConfig, FeedForwardConfig, MixerConfig
from mt_model.block.norm_config import NormConfig
from mt_model.block.sizes import MAX_LAYERS, Sizes
from mt_model.block.stream import StreamConfig
from mt_model.feed_forward.mlp_config import MLPConfig
from mt_model.feed_forward.moe_config import BIAS_RATE, MoEConfig
from mt_model.kernels.config import Kernels
from mt_model.kernels.words import (
    Activation,
    KernelSet,
    Norms,
    Positions,
    QKNorm,
    Recompute,
    Sinks,
)
from mt_model.language.config import VOCABULARY, ModelConfig
from mt_model.language.mtp_config import MTPConfig
from mt_model.language.pooled_head_config import PooledHeadConfig
from mt_model.recompute.plan import OffloadConfig, RecomputePlan, RecomputeRule
from mt_model.recurrent.gated_delta_net_config import GatedDeltaNetConfig
from mt_model.recurrent.mamba2_config import Mamba2Config
from mt_model.rope.config import RopeConfig, Rotary
from mt_model.rope.scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongropeScaling,
    RopeScaling,
    YarnScaling,
)
from mt_model.rope.temperature import TemperatureConfig
from mt_model.stack.config import StackConfig
from mt_model.stack.layer_config import LayerConfig
from mt_model.vision.config import VisionConfig
from mt_model.vision.image_input_config import ImageInputConfig, expand_image_tokens
from mt_model.vision.pooling_config import (
    AttentionPoolingConfig,
    ClassPoolingConfig,
    PoolingConfig,
)

if TYPE_CHECKING:
    from mt_model.attend.cache import KVCache, Pages
    from mt_model.attend.context import ForwardContext
    from mt_model.attend.slots import Slots
    from mt_model.block.initial import start_from
    from mt_model.block.losses import Losses
    from mt_model.block.shard_context import ShardContext
    from mt_model.generation.decoding import GraphedDecoding
    from mt_model.generation.kv_calibration import calibrate_kv_cache, kv_formats
    from mt_model.kernels.dtype import DTYPES
    from mt_model.language.decoder import GPT
    from mt_model.language.encoder_decoder import EncoderDecoder
    from mt_model.memory.activation_memory import expected_bytes
    from mt_model.memory.activation_table import kept_by_module, without_data
    from mt_model.memory.allocator import keep_freed_memory
    from mt_model.plugins import (
        PluginError,
        load_installed_plugins,
        load_plugin,
        load_recorded_plugins,
    )
    from mt_model.presets.encoder_decoders import encoder_decoder_layers
    from mt_model.presets.gpt import FIELDS, SHORT_FORMS, gpt, model_of
    from mt_model.presets.image_encoders import VISION_PRESETS, vision_preset, vit
    from mt_model.presets.shapes import PRESETS, preset
    from mt_model.recompute.saved_activations import KeptBytes
    from mt_model.stack.fake_quantization import (
        FakeQuantizedGemm,
        block_linears,
        fake_quantize,
        grouped_layers,
    )
    from mt_model.stack.initialization import initializer
    from mt_model.stack.routers import (
        balance_experts,
        expert_loads,
        is_buffer,
        saved_buffers,
        saved_tensors,
    )
    from mt_model.stack.stack import Stack
    from mt_model.stack.stage_graph import GraphOptions, graph_stage
    from mt_model.stack.validation import validate_context, validate_split
    from mt_model.vision.encoder import VisionEncoder

__all__ = [
    "BIAS_RATE",
    "DTYPES",
    "FIELDS",
    "GPT",
    "MAX_LAYERS",
    "PRESETS",
    "SHORT_FORMS",
    "VISION_PRESETS",
    "VOCABULARY",
    "Activation",
    "AlibiConfig",
    "AttentionConfig",
    "AttentionPoolingConfig",
    "ClassPoolingConfig",
    "CrossAttentionConfig",
    "DynamicScaling",
    "EncoderDecoder",
    "EntryConfig",
    "FakeQuantizedGemm",
    "FeedForwardConfig",
    "ForwardContext",
    "GatedDeltaNetConfig",
    "GraphOptions",
    "GraphedDecoding",
    "ImageInputConfig",
    "KVCache",
    "KeptBytes",
    "KernelSet",
    "Kernels",
    "LayerConfig",
    "LinearScaling",
    "Llama3Scaling",
    "LongropeScaling",
    "Losses",
    "MLAConfig",
    "MLPConfig",
    "MTPConfig",
    "Mamba2Config",
    "MixerConfig",
    "MoEConfig",
    "ModelConfig",
    "NormConfig",
    "Norms",
    "OffloadConfig",
    "Pages",
    "PluginError",
    "PooledHeadConfig",
    "PoolingConfig",
    "Positions",
    "QKNorm",
    "Recompute",
    "RecomputePlan",
    "RecomputeRule",
    "RelativeConfig",
    "RopeConfig",
    "RopeScaling",
    "Rotary",
    "ScoreBias",
    "ShardContext",
    "Sinks",
    "Sizes",
    "Slots",
    "Stack",
    "StackConfig",
    "StreamConfig",
    "TemperatureConfig",
    "VisionConfig",
    "VisionEncoder",
    "YarnScaling",
    "balance_experts",
    "block_linears",
    "calibrate_kv_cache",
    "encoder_decoder_layers",
    "expand_image_tokens",
    "expected_bytes",
    "expert_loads",
    "fake_quantize",
    "gpt",
    "graph_stage",
    "grouped_layers",
    "initializer",
    "is_buffer",
    "keep_freed_memory",
    "kept_by_module",
    "kv_formats",
    "load_installed_plugins",
    "load_plugin",
    "load_recorded_plugins",
    "model_of",
    "preset",
    "saved_buffers",
    "saved_tensors",
    "score_scale",
    "start_from",
    "validate_context",
    "validate_split",
    "vision_preset",
    "vit",
    "without_data",
]

# What needs torch is resolved at first use: a configuration is checked without it.
__getattr__ = resolve_later(__name__)
