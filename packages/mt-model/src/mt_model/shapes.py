"""Published shapes by name: the family with its version, then the size, as in `llama3.2-1b`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mt_files import FieldError, did_you_mean, shorten

from mt_model.config import ModelConfig
from mt_model.presets import gpt
from mt_model.rope import RopeConfig
from mt_model.rope_scaling import Llama3Scaling

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


_PRESETS: Mapping[str, _Arguments] = MappingProxyType(
    {
        "tiny": _shape(512, 64, 4, 4, num_kv_heads=2, ffn_size=192, max_sequence_length=256),
        "gpt2": _shape(50257, 768, 12, 12, **_GPT2),
        "gpt2-medium": _shape(50257, 1024, 24, 16, **_GPT2),
        "gpt2-large": _shape(50257, 1280, 36, 20, **_GPT2),
        "gpt2-xl": _shape(50257, 1600, 48, 25, **_GPT2),
        "llama2-7b": _shape(32000, 4096, 32, 32, ffn_size=11008, **_LLAMA2),
        "llama2-13b": _shape(32000, 5120, 40, 40, ffn_size=13824, **_LLAMA2),
        "llama2-70b": _shape(32000, 8192, 80, 64, num_kv_heads=8, ffn_size=28672, **_LLAMA2),
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
        "qwen2.5-0.5b": _shape(151936, 896, 24, 14, num_kv_heads=2, ffn_size=4864, **_QWEN2),
        "qwen2.5-1.5b": _shape(151936, 1536, 28, 12, num_kv_heads=2, ffn_size=8960, **_QWEN2),
        "qwen2.5-7b": _shape(
            152064, 3584, 28, 28, num_kv_heads=4, ffn_size=18944, tied=False, **_QWEN2
        ),
        "qwen3-0.6b": _shape(151936, 1024, 28, 16, ffn_size=3072, **_QWEN3),
        "qwen3-1.7b": _shape(151936, 2048, 28, 16, ffn_size=6144, **_QWEN3),
        "qwen3-4b": _shape(151936, 2560, 36, 32, ffn_size=9728, **_QWEN3),
        "qwen3-8b": _shape(151936, 4096, 36, 32, ffn_size=12288, tied=False, **_QWEN3),
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
        "bert-large": _shape(30522, 1024, 24, 16, ffn_size=4096, **_BERT),
        "granite3-2b": _shape(49155, 2048, 40, 32, ffn_size=8192, **_GRANITE3),
        "mamba2-130m": _mamba2(768, 24),
        "mamba2-370m": _mamba2(1024, 48),
        "mamba2-780m": _mamba2(1536, 48),
        "mamba2-1.3b": _mamba2(2048, 48),
        "mamba2-2.7b": _mamba2(2560, 64),
    }
)

# What layers have in place of that, in turns.
_TURNS: Mapping[str, tuple[_Arguments, ...]] = MappingProxyType(
    {
        "gemma2-2b": ({"window": 4096}, {}),
        "gemma2-9b": ({"window": 4096}, {}),
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
    if name not in _PRESETS:
        text = f"{shorten(name)} is not known. {did_you_mean(name, PRESETS)}"
        raise FieldError({"preset": text})
    known = sorted(inspect.signature(gpt).parameters)
    for key in overrides:
        if key not in known:
            text = f"unknown override of preset {name!r}. {did_you_mean(key, known)}"
            raise FieldError({key: text})
    arguments = {**_PRESETS[name], **overrides}
    config = gpt(**arguments)
    turns = [gpt(**{**arguments, **each, **overrides}).layers[0] for each in _TURNS.get(name, ())]
    if not turns:
        return config
    layers = tuple(turns[index % len(turns)] for index in range(config.num_layers))
    return replace(config, layers=layers)
