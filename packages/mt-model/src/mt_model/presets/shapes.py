"""Published shapes by name: the family with its version, then the size, as in `llama3.2-1b`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mt_model.attend.score_bias import RelativeConfig
from mt_model.attention.config import AttentionConfig
from mt_model.feed_forward.mlp_config import MLPConfig
from mt_model.feed_forward.moe_config import MoEConfig
from mt_model.language.config import ModelConfig
from mt_model.presets.encoder_decoders import encoder_decoder_layers
from mt_model.presets.gpt import FIELDS, SHORT_FORMS, model_of
from mt_model.presets.image_encoders import preset_arguments, vision_preset
from mt_model.presets.mixtures import MIXTURES
from mt_model.rope.config import RopeConfig
from mt_model.rope.scaling import Llama3Scaling
from mt_model.vision.image_input_config import ImageInputConfig

_Arguments = Mapping[str, Any]


def _shape(vocab: int, hidden: int, layers: int, heads: int, **rest: Any) -> _Arguments:
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "num_layers": layers, "num_heads": heads}
    return MappingProxyType({**sizes, **rest})


_GPT2: _Arguments = {
    "max_sequence_length": 1024,
    "positions": "learned",
    "norm": "layer",
    "activation": "gelu_tanh",
    "gated": False,
    "bias": True,
}
_LLAMA2: _Arguments = {"norm_rounds_first": True, "max_sequence_length": 4096, "tied": False}
_LLAVA15 = ImageInputConfig(
    tower=vision_preset("clip-vit-large-14-336", projection_size=None), token_id=32000
)
_LLAMA3: _Arguments = {
    "norm_rounds_first": True,
    "num_kv_heads": 8,
    "rope_theta": 500000.0,
    "max_sequence_length": 8192,
}


def _llama31(factor: float) -> _Arguments:
    """Llama 3 with the rotation stretched to 131,072 positions."""
    rope = RopeConfig(theta=500000.0, scaling=Llama3Scaling(factor=factor))
    return {**_LLAMA3, "rope": rope, "max_sequence_length": 131072}


_QWEN: _Arguments = {
    "norm_rounds_first": True,
    "norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_sequence_length": 32768,
}
_QWEN2: _Arguments = {**_QWEN, "qkv_bias": True}
_OLMO2: _Arguments = {
    "norm_eps": 1e-6,
    "norms": "output",
    "qk_norm": "whole",
    "rope_theta": 500000.0,
    "tied": False,
    "max_sequence_length": 4096,
}
_NEOX: _Arguments = {
    "norm": "layer",
    "parallel": True,
    "activation": "gelu",
    "gated": False,
    "bias": True,
    "rope": RopeConfig(fraction=0.25),
    "tied": False,
    "max_sequence_length": 2048,
}
_PHI2: _Arguments = {
    **_NEOX,
    "shared_norm": True,
    "activation": "gelu_tanh",
    "rope": RopeConfig(fraction=0.4),
    "head_bias": True,
}
_BERT: _Arguments = {
    "positions": "learned",
    "causal": False,
    "norm": "layer",
    "norm_eps": 1e-12,
    "norms": "post",
    "activation": "gelu",
    "gated": False,
    "bias": True,
    "embedding_norm": True,
    "token_types": 2,
    "head_transform": "gelu",
    "head_bias": True,
    "max_sequence_length": 512,
}
_QWEN3: _Arguments = {**_QWEN, "num_kv_heads": 8, "head_dim": 128, "qk_norm": "head"}
_GEMMA: _Arguments = {
    "norm_eps": 1e-6,
    "norm_zero_centered": True,
    "norms": "sandwich",
    "activation": "gelu_tanh",
    "head_dim": 256,
    "max_sequence_length": 8192,
}
_GEMMA2: _Arguments = {**_GEMMA, "softcap": 50.0, "logit_softcap": 30.0}
_GRANITE3: _Arguments = {
    "norm_rounds_first": True,
    "num_kv_heads": 8,
    "embedding_scale": 12.0,
    "residual_scale": 0.22,
    "attention_scale": 0.015625,
    "logit_scale": 0.125,
    "max_sequence_length": 4096,
}


def _mamba2(hidden: int, layers: int) -> _Arguments:
    """Shapes of Dao & Gu (2024): twice as wide inside, heads of 64, one group."""
    mixer = {"type": "mamba2", "num_heads": hidden // 32, "head_dim": 64, "state_size": 128}
    return MappingProxyType(
        {
            "vocab_size": 50288,
            "hidden_size": hidden,
            "positions": "none",
            "layers": ({"mixer": mixer, "repeat": layers},),
        }
    )


def _t5(hidden: int, ffn: int, layers: int, heads: int, head_dim: int = 64) -> _Arguments:
    """Shapes of Raffel et al. (2020): as many layers in the decoder as in the encoder."""
    return _encoder_decoder(
        hidden,
        MLPConfig(ffn_size=ffn, activation="relu", gated=False),
        layers=layers,
        heads=heads,
        head_dim=head_dim,
        logit_scale=hidden**-0.5,
    )


def _flan_t5(hidden: int, ffn: int, layers: int, heads: int, **rest: Any) -> _Arguments:
    """Shapes of T5 1.1: gated feed-forwards, and a head of its own."""
    mlp = MLPConfig(ffn_size=ffn, activation="gelu_tanh")
    sizes = {"layers": layers, "heads": heads, "head_dim": 64}
    return _encoder_decoder(hidden, mlp, **sizes, tied=False, **rest)


_MT5: _Arguments = {"vocab_size": 250112, "max_sequence_length": 1024}  # Xue et al. (2021)


def _encoder_decoder(
    hidden: int, mlp: MLPConfig, *, layers: int, heads: int, head_dim: int, **rest: Any
) -> _Arguments:
    attention = AttentionConfig(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        scale=1.0,
        score_bias=RelativeConfig(),
    )
    return MappingProxyType(
        {
            "vocab_size": 32128,
            "hidden_size": hidden,
            "max_sequence_length": 512,
            "positions": "none",
            "norm_eps": 1e-6,
            "norm_rounds_first": True,
            "layers": encoder_decoder_layers(attention, mlp, encoder=layers, decoder=layers),
            "encoder_layers": layers,
            **rest,
        }
    )


_PRESETS: Mapping[str, _Arguments] = MappingProxyType(
    {
        "tiny": _shape(512, 64, 4, 4, num_kv_heads=2, ffn_size=192, max_sequence_length=256),
        "moe-tiny": _shape(
            512,
            64,
            4,
            4,
            num_kv_heads=2,
            max_sequence_length=256,
            moe=MoEConfig(num_experts=8, ffn_size=96, aux_loss=0.01, router_z_loss=0.001),
        ),
        "gpt2": _shape(50257, 768, 12, 12, **_GPT2),
        "gpt2-medium": _shape(50257, 1024, 24, 16, **_GPT2),
        "gpt2-large": _shape(50257, 1280, 36, 20, **_GPT2),
        "gpt2-xl": _shape(50257, 1600, 48, 25, **_GPT2),
        "llama2-7b": _shape(32000, 4096, 32, 32, ffn_size=11008, **_LLAMA2),
        "llama2-13b": _shape(32000, 5120, 40, 40, ffn_size=13824, **_LLAMA2),
        "llama2-70b": _shape(32000, 8192, 80, 64, num_kv_heads=8, ffn_size=28672, **_LLAMA2),
        "llava-1.5-7b": _shape(32064, 4096, 32, 32, ffn_size=11008, images=_LLAVA15, **_LLAMA2),
        "llama3-8b": _shape(128256, 4096, 32, 32, ffn_size=14336, tied=False, **_LLAMA3),
        "llama3-70b": _shape(128256, 8192, 80, 64, ffn_size=28672, tied=False, **_LLAMA3),
        "llama3.1-8b": _shape(128256, 4096, 32, 32, ffn_size=14336, tied=False, **_llama31(8.0)),
        "llama3.1-70b": _shape(128256, 8192, 80, 64, ffn_size=28672, tied=False, **_llama31(8.0)),
        "llama3.2-1b": _shape(128256, 2048, 16, 32, ffn_size=8192, **_llama31(32.0)),
        "llama3.2-3b": _shape(128256, 3072, 28, 24, ffn_size=8192, **_llama31(32.0)),
        "mistral-7b": _shape(
            32000,
            4096,
            32,
            32,
            num_kv_heads=8,
            ffn_size=14336,
            window=4096,
            tied=False,
            norm_rounds_first=True,
            max_sequence_length=32768,
        ),
        "mixtral-8x7b": _shape(
            32000,
            4096,
            32,
            32,
            num_kv_heads=8,
            tied=False,
            rope_theta=1e6,
            norm_rounds_first=True,
            max_sequence_length=32768,
            moe=MoEConfig(num_experts=8, ffn_size=14336, aux_loss=0.02),
        ),
        "qwen2.5-0.5b": _shape(151936, 896, 24, 14, num_kv_heads=2, ffn_size=4864, **_QWEN2),
        "qwen2.5-1.5b": _shape(151936, 1536, 28, 12, num_kv_heads=2, ffn_size=8960, **_QWEN2),
        "qwen2.5-7b": _shape(
            152064, 3584, 28, 28, num_kv_heads=4, ffn_size=18944, tied=False, **_QWEN2
        ),
        "qwen3-0.6b": _shape(151936, 1024, 28, 16, ffn_size=3072, **_QWEN3),
        "qwen3-1.7b": _shape(151936, 2048, 28, 16, ffn_size=6144, **_QWEN3),
        "qwen3-4b": _shape(151936, 2560, 36, 32, ffn_size=9728, **_QWEN3),
        "qwen3-8b": _shape(151936, 4096, 36, 32, ffn_size=12288, tied=False, **_QWEN3),
        "qwen3-30b-a3b": _shape(
            151936,
            2048,
            48,
            32,
            num_kv_heads=4,
            tied=False,
            moe=MoEConfig(num_experts=128, top_k=8, ffn_size=768, aux_loss=0.001),
            **{name: value for name, value in _QWEN3.items() if name != "num_kv_heads"},
        ),
        "gemma2-2b": _shape(
            256000,
            2304,
            26,
            8,
            num_kv_heads=4,
            ffn_size=9216,
            embedding_scale=math.sqrt(2304),
            **_GEMMA2,
        ),
        "gemma2-9b": _shape(
            256000,
            3584,
            42,
            16,
            num_kv_heads=8,
            ffn_size=14336,
            embedding_scale=math.sqrt(3584),
            **_GEMMA2,
        ),
        "gemma3-1b": _shape(
            262144,
            1152,
            26,
            4,
            num_kv_heads=1,
            ffn_size=6912,
            embedding_scale=math.sqrt(1152),
            qk_norm="head",
            rope_theta=1e6,
            **{**_GEMMA, "max_sequence_length": 32768},
        ),
        "phi3-mini": _shape(
            32064,
            3072,
            32,
            32,
            ffn_size=8192,
            window=2047,
            tied=False,
            norm_rounds_first=True,
            max_sequence_length=4096,
        ),
        "olmo2-1b": _shape(100352, 2048, 16, 16, ffn_size=8192, **_OLMO2),
        "olmo2-7b": _shape(100352, 4096, 32, 32, ffn_size=11008, **_OLMO2),
        "pythia-410m": _shape(50304, 1024, 24, 16, ffn_size=4096, **_NEOX),
        "gpt-neox-20b": _shape(50432, 6144, 44, 64, ffn_size=24576, **_NEOX),
        "phi2": _shape(51200, 2560, 32, 32, ffn_size=10240, **_PHI2),
        "bert-base": _shape(30522, 768, 12, 12, ffn_size=3072, **_BERT),
        "bert-base-cased": _shape(28996, 768, 12, 12, ffn_size=3072, **_BERT),
        "bert-large": _shape(30522, 1024, 24, 16, ffn_size=4096, **_BERT),
        "bert-large-cased": _shape(28996, 1024, 24, 16, ffn_size=4096, **_BERT),
        "granite3-2b": _shape(49155, 2048, 40, 32, ffn_size=8192, **_GRANITE3),
        "mamba2-130m": _mamba2(768, 24),
        "mamba2-370m": _mamba2(1024, 48),
        "mamba2-780m": _mamba2(1536, 48),
        "mamba2-1.3b": _mamba2(2048, 48),
        "mamba2-2.7b": _mamba2(2560, 64),
        "t5-small": _t5(512, 2048, 6, 8),
        "t5-base": _t5(768, 3072, 12, 12),
        "t5-large": _t5(1024, 4096, 24, 16),
        "t5-3b": _t5(1024, 16384, 24, 32, 128),
        "t5-11b": _t5(1024, 65536, 24, 128, 128),
        "flan-t5-small": _flan_t5(512, 1024, 8, 6),
        "flan-t5-base": _flan_t5(768, 2048, 12, 12),
        "flan-t5-large": _flan_t5(1024, 2816, 24, 16),
        "flan-t5-xl": _flan_t5(2048, 5120, 24, 32),
        "flan-t5-xxl": _flan_t5(4096, 10240, 24, 64),
        "mt5-small": _flan_t5(512, 1024, 8, 6, **_MT5),
        "mt5-base": _flan_t5(768, 2048, 12, 12, **_MT5),
        "mt5-large": _flan_t5(1024, 2816, 24, 16, **_MT5),
        "mt5-xl": _flan_t5(2048, 5120, 24, 32, **_MT5),
        "mt5-xxl": _flan_t5(4096, 10240, 24, 64, **_MT5),
        **MIXTURES,
    }
)

# What layers have in place of that, in turns.
_TURNS: Mapping[str, tuple[_Arguments, ...]] = MappingProxyType(
    {
        "gemma2-2b": ({"window": 4096}, {}),
        "gemma2-9b": ({"window": 4096}, {}),
        "gpt-oss-20b": ({"window": 128}, {}),
        "gpt-oss-120b": ({"window": 128}, {}),
        "gemma3-1b": (*({"window": 512, "rope_theta": 10000.0},) * 5, {}),
    }
)

PRESETS: tuple[str, ...] = tuple(_PRESETS)


def preset(name: str, **overrides: Any) -> ModelConfig:
    """The named shape, with any argument of `gpt` replaced, in all layers.

    Raises:
        FieldError: the name or an override is unknown, or sizes do not fit; the message suggests
            the nearest.
    """
    arguments = preset_arguments(name, _PRESETS, (*FIELDS, *SHORT_FORMS), overrides)
    config = model_of(arguments)
    turns = [
        model_of({**arguments, **each, **overrides}).layers[0] for each in _TURNS.get(name, ())
    ]
    if not turns:
        return config
    layers = tuple(turns[index % len(turns)] for index in range(config.num_layers))
    return replace(config, layers=layers)
