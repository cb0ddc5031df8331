"""Published shapes of mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mt_model.attention.config import AttentionConfig
from mt_model.attention.mla_config import MLAConfig, score_scale
from mt_model.feed_forward.mlp_config import MLPConfig
from mt_model.feed_forward.moe_config import BIAS_RATE, MoEConfig
from mt_model.rope.config import RopeConfig
from mt_model.rope.scaling import Llama3Scaling, YarnScaling
from mt_model.rope.temperature import TemperatureConfig
from mt_model.stack.layer_config import LayerConfig

_Arguments = Mapping[str, Any]


def _gpt_oss(layers: int, num_experts: int) -> _Arguments:
    """GPT-OSS (2025): sinks, biases, and YaRN whose bounds are no whole indices."""
    yarn = YarnScaling(factor=32.0, original_length=4096, truncate=False)
    moe = MoEConfig(
        num_experts=num_experts,
        ffn_size=2880,
        top_k=4,
        activation="gelu_quick",
        bias=True,
        clamp=7.0,
        up_offset=1.0,
        score="softmax_of_chosen",
        router_bias=True,
    )
    return {
        "vocab_size": 201088,
        "hidden_size": 2880,
        "num_layers": layers,
        "num_heads": 64,
        "num_kv_heads": 8,
        "head_dim": 64,
        "qkv_bias": True,
        "out_bias": True,
        "sinks": "learned",
        "rope": RopeConfig(theta=150000.0, scaling=yarn),
        "tied": False,
        "max_sequence_length": 131072,
        "moe": moe,
    }


def _deepseek(  # noqa: PLR0913 - the sizes that differ
    vocab: int,
    hidden: int,
    *,
    layers: int,
    heads: int,
    dense: int,
    ffn: int,
    moe: MoEConfig,
    mscale: float,
    q_lora_rank: int | None = None,
) -> _Arguments:
    """DeepSeek-V2 and V3 (2024): plain feed-forwards first, YaRN to 163,840 positions."""
    yarn = YarnScaling(factor=40.0, original_length=4096, mscale=mscale, mscale_all_dim=mscale)
    rope = RopeConfig(interleaved=True, scaling=yarn)
    mixer = MLAConfig(
        num_heads=heads,
        kv_lora_rank=512,
        nope_head_dim=128,
        rope_head_dim=64,
        v_head_dim=128,
        q_lora_rank=q_lora_rank,
        rope=rope,
        norm_eps=1e-6,
    )
    mixer = replace(mixer, scale=score_scale(mixer.head_dim, rope))
    first = LayerConfig(mixer=mixer, feed_forward=MLPConfig(ffn_size=ffn))
    other = LayerConfig(mixer=mixer, feed_forward=moe)
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "layers": (*[first] * dense, *[other] * (layers - dense)),
        "norm_eps": 1e-6,
        "norm_rounds_first": True,
        "tied": False,
        "max_sequence_length": 163840,
    }


def _llama4_scout() -> _Arguments:
    """Llama 4 Scout (2025), its text model: each fourth layer turns nothing and sees all."""
    rope = RopeConfig(theta=500000.0, interleaved=True, scaling=Llama3Scaling(factor=8.0))
    whole = AttentionConfig(
        num_heads=40, num_kv_heads=8, head_dim=128, temperature=TemperatureConfig()
    )
    near = replace(whole, rope=rope, qk_norm="l2", chunk=8192, temperature=None)
    moe = MoEConfig(
        num_experts=16,
        ffn_size=8192,
        top_k=1,
        score="sigmoid",
        normalize=False,
        scale_input=True,
        aux_loss=0.001,
        shared_size=8192,
    )
    turn = [LayerConfig(mixer=mixer, feed_forward=moe) for mixer in (near, near, near, whole)]
    return {
        "vocab_size": 202048,
        "hidden_size": 5120,
        "layers": (*turn * 12,),
        "norm_rounds_first": True,
        "tied": False,
        "max_sequence_length": 262144,
    }


MIXTURES: Mapping[str, _Arguments] = MappingProxyType(
    {
        "olmoe-1b-7b": {
            "vocab_size": 50304,
            "hidden_size": 2048,
            "num_layers": 16,
            "num_heads": 16,
            "qk_norm": "whole",
            "norm_rounds_first": True,
            "tied": False,
            "max_sequence_length": 4096,
            "moe": MoEConfig(
                num_experts=64, ffn_size=1024, top_k=8, normalize=False, aux_loss=0.01
            ),
        },
        "qwen1.5-moe-a2.7b": {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "num_layers": 24,
            "num_heads": 16,
            "qkv_bias": True,
            "norm_eps": 1e-6,
            "norm_rounds_first": True,
            "rope_theta": 1e6,
            "tied": False,
            "max_sequence_length": 8192,
            "moe": MoEConfig(
                num_experts=60,
                ffn_size=1408,
                top_k=4,
                normalize=False,
                aux_loss=0.001,
                shared_size=5632,
                shared_gate=True,
            ),
        },
        "gpt-oss-20b": _gpt_oss(24, 32),
        "gpt-oss-120b": _gpt_oss(36, 128),
        "llama4-scout": _llama4_scout(),
        "deepseek-v2-lite": _deepseek(
            102400,
            2048,
            layers=27,
            heads=16,
            dense=1,
            ffn=10944,
            mscale=0.707,
            moe=MoEConfig(
                num_experts=64,
                ffn_size=1408,
                top_k=6,
                normalize=False,
                sequence_aux_loss=0.001,
                shared_size=2816,
            ),
        ),
        "deepseek-v3": _deepseek(
            129280,
            7168,
            layers=61,
            heads=128,
            dense=3,
            ffn=18432,
            mscale=1.0,
            q_lora_rank=1536,
            moe=MoEConfig(
                num_experts=256,
                ffn_size=2048,
                top_k=8,
                score="sigmoid",
                scale=2.5,
                num_groups=8,
                top_groups=4,
                group_top=2,
                bias_rate=BIAS_RATE,
                sequence_aux_loss=0.0001,
                shared_size=2048,
            ),
        ),
    }
)
