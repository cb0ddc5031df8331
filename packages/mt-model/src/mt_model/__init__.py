"""Transformer models as a typed list of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_model.attend.score_bias import AlibiConfig as AlibiConfig
from mt_model.attend.score_bias import RelativeConfig as RelativeConfig
from mt_model.attend.score_bias import ScoreBias as ScoreBias
from mt_model.attention.config import AttentionConfig as AttentionConfig
from mt_model.attention.cross_attention_config import CrossAttentionConfig as CrossAttentionConfig
from mt_model.attention.mla_config import MLAConfig as MLAConfig
from mt_model.attention.mla_config import score_scale as score_scale
from mt_model.block.entry import EntryConfig as EntryConfig
from mt_model.block.entry import FeedForwardConfig as FeedForwardConfig
from mt_model.block.entry import MixerConfig as MixerConfig
from mt_model.block.norm_config import NormConfig as NormConfig
from mt_model.block.sizes import MAX_LAYERS as MAX_LAYERS
from mt_model.block.sizes import Sizes as Sizes
from mt_model.block.stream import StreamConfig as StreamConfig
from mt_model.feed_forward.mlp_config import MLPConfig as MLPConfig
from mt_model.feed_forward.moe_config import BIAS_RATE as BIAS_RATE
from mt_model.feed_forward.moe_config import MoEConfig as MoEConfig
from mt_model.kernels.config import Kernels as Kernels
from mt_model.kernels.words import Activation as Activation
from mt_model.kernels.words import KernelSet as KernelSet
from mt_model.kernels.words import Norms as Norms
from mt_model.kernels.words import Positions as Positions
from mt_model.kernels.words import QKNorm as QKNorm
from mt_model.kernels.words import Recompute as Recompute
from mt_model.kernels.words import Sinks as Sinks
from mt_model.language.config import VOCABULARY as VOCABULARY
from mt_model.language.config import ModelConfig as ModelConfig
from mt_model.language.mtp_config import MTPConfig as MTPConfig
from mt_model.language.pooled_head_config import PooledHeadConfig as PooledHeadConfig
from mt_model.recompute.plan import OffloadConfig as OffloadConfig
from mt_model.recompute.plan import RecomputePlan as RecomputePlan
from mt_model.recompute.plan import RecomputeRule as RecomputeRule
from mt_model.recurrent.gated_delta_net_config import GatedDeltaNetConfig as GatedDeltaNetConfig
from mt_model.recurrent.mamba2_config import Mamba2Config as Mamba2Config
from mt_model.rope.config import RopeConfig as RopeConfig
from mt_model.rope.config import Rotary as Rotary
from mt_model.rope.scaling import DynamicScaling as DynamicScaling
from mt_model.rope.scaling import LinearScaling as LinearScaling
from mt_model.rope.scaling import Llama3Scaling as Llama3Scaling
from mt_model.rope.scaling import LongropeScaling as LongropeScaling
from mt_model.rope.scaling import RopeScaling as RopeScaling
from mt_model.rope.scaling import YarnScaling as YarnScaling
from mt_model.rope.temperature import TemperatureConfig as TemperatureConfig
from mt_model.stack.config import StackConfig as StackConfig
from mt_model.stack.layer_config import LayerConfig as LayerConfig
from mt_model.stack.lora_config import LoraConfig as LoraConfig
from mt_model.stack.retro_config import RetroConfig as RetroConfig
from mt_model.vision.config import VisionConfig as VisionConfig
from mt_model.vision.image_input_config import ImageInputConfig as ImageInputConfig
from mt_model.vision.image_input_config import expand_image_tokens as expand_image_tokens
from mt_model.vision.pooling_config import AttentionPoolingConfig as AttentionPoolingConfig
from mt_model.vision.pooling_config import ClassPoolingConfig as ClassPoolingConfig
from mt_model.vision.pooling_config import PoolingConfig as PoolingConfig

if TYPE_CHECKING:
    from mt_model.attend.cache import KVCache as KVCache
    from mt_model.attend.cache import Pages as Pages
    from mt_model.attend.context import ForwardContext as ForwardContext
    from mt_model.attend.slots import Peers as Peers
    from mt_model.attend.slots import Slots as Slots
    from mt_model.block.initial import start_from as start_from
    from mt_model.block.losses import Losses as Losses
    from mt_model.block.shard_context import ShardContext as ShardContext
    from mt_model.generation.adapters import AdapterBank as AdapterBank
    from mt_model.generation.decoding import GraphedDecoding as GraphedDecoding
    from mt_model.generation.invariance import invariance_obstacle as invariance_obstacle
    from mt_model.generation.kv_calibration import calibrate_kv_cache as calibrate_kv_cache
    from mt_model.generation.kv_calibration import kv_formats as kv_formats
    from mt_model.generation.packing import pack_weights as pack_weights
    from mt_model.generation.packing import packing_obstacle as packing_obstacle
    from mt_model.generation.packing import serving_products as serving_products
    from mt_model.kernels.dtype import DTYPES as DTYPES
    from mt_model.language.decoder import GPT as GPT
    from mt_model.language.encoder_decoder import EncoderDecoder as EncoderDecoder
    from mt_model.memory.activation_memory import expected_bytes as expected_bytes
    from mt_model.memory.activation_table import kept_by_module as kept_by_module
    from mt_model.memory.activation_table import without_data as without_data
    from mt_model.memory.allocator import keep_freed_memory as keep_freed_memory
    from mt_model.plugins import PluginError as PluginError
    from mt_model.plugins import load_installed_plugins as load_installed_plugins
    from mt_model.plugins import load_plugin as load_plugin
    from mt_model.plugins import load_recorded_plugins as load_recorded_plugins
    from mt_model.presets.encoder_decoders import encoder_decoder_layers as encoder_decoder_layers
    from mt_model.presets.gpt import FIELDS as FIELDS
    from mt_model.presets.gpt import SHORT_FORMS as SHORT_FORMS
    from mt_model.presets.gpt import gpt as gpt
    from mt_model.presets.gpt import model_of as model_of
    from mt_model.presets.image_encoders import VISION_PRESETS as VISION_PRESETS
    from mt_model.presets.image_encoders import vision_preset as vision_preset
    from mt_model.presets.image_encoders import vit as vit
    from mt_model.presets.shapes import PRESETS as PRESETS
    from mt_model.presets.shapes import preset as preset
    from mt_model.recompute.saved_activations import KeptBytes as KeptBytes
    from mt_model.stack.adapters import adapted_layers as adapted_layers
    from mt_model.stack.adapters import unknown_layers as unknown_layers
    from mt_model.stack.batch import check_fields as check_fields
    from mt_model.stack.fake_quantization import FakeQuantizedGemm as FakeQuantizedGemm
    from mt_model.stack.fake_quantization import block_linears as block_linears
    from mt_model.stack.fake_quantization import fake_quantize as fake_quantize
    from mt_model.stack.fake_quantization import grouped_layers as grouped_layers
    from mt_model.stack.fake_quantization import matrix_shape as matrix_shape
    from mt_model.stack.initialization import initializer as initializer
    from mt_model.stack.routers import balance_experts as balance_experts
    from mt_model.stack.routers import expert_loads as expert_loads
    from mt_model.stack.routers import is_buffer as is_buffer
    from mt_model.stack.routers import saved_buffers as saved_buffers
    from mt_model.stack.routers import saved_tensors as saved_tensors
    from mt_model.stack.stack import Stack as Stack
    from mt_model.stack.stage_graph import GraphOptions as GraphOptions
    from mt_model.stack.stage_graph import graph_stage as graph_stage
    from mt_model.stack.validation import validate_context as validate_context
    from mt_model.stack.validation import validate_split as validate_split
    from mt_model.stack.weight_codes import WeightCodes as WeightCodes
    from mt_model.stack.weight_codes import weight_codes as weight_codes
    from mt_model.vision.encoder import VisionEncoder as VisionEncoder
else:
    # What needs torch is resolved at first use: a configuration is checked without it.
    __getattr__ = resolve_later(__name__)
