"""A model's description in the fields of GGUF, as far as llama.cpp computes the same model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from mt_model import (
    AttentionConfig,
    LinearScaling,
    Llama3Scaling,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    RopeScaling,
    YarnScaling,
)

from mt_hf.family.decoder import first_mixer
from mt_hf.family.error import ExchangeError
from mt_hf.family.windows import whole_and_local, window_period, windows_of
from mt_hf.gguf.tensors import GEMMAS, architecture_of
from mt_hf.writing.source import NamedTensors

_SCALINGS: Mapping[str, tuple[type[RopeScaling], ...]] = MappingProxyType(
    {
        "llama": (LinearScaling, Llama3Scaling, YarnScaling),
        "qwen2": (LinearScaling, YarnScaling),
        "qwen3": (LinearScaling, YarnScaling),
        "gemma2": (LinearScaling,),
        "gemma3": (LinearScaling,),
    }
)
_LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the model whose scale is another
_PERIOD = {"gemma2": 2, "gemma3": 6}  # layers from one without a window to the next


def metadata_of(tensors: NamedTensors) -> dict[str, Any]:
    """Return the fields that describe a model, by key.

    Raises:
        ExchangeError: The family has no mapping, or llama.cpp would compute another model; the
            message lists the reasons.
    """
    config, architecture = tensors.config, architecture_of(tensors.family)
    mixer, feed_forward = first_mixer(config), config.layers[0].feed_forward
    problems = [*_problems(config, mixer, architecture)]
    if problems:
        lines = "\n  ".join(problems)
        raise ExchangeError(f"llama.cpp would compute another model:\n  {lines}")
    fields: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": context_length(config, architecture),
        "embedding_length": config.hidden_size,
        "attention.head_count": mixer.num_heads,
        "attention.head_count_kv": mixer.num_kv_heads,
        "attention.key_length": mixer.head_dim,
        "attention.value_length": mixer.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm.eps,
        **_rope_fields(config, mixer),
    }
    if isinstance(feed_forward, MoEConfig):
        fields["feed_forward_length"] = feed_forward.width
        fields["expert_count"] = feed_forward.num_experts
        fields["expert_used_count"] = feed_forward.top_k
    elif isinstance(feed_forward, MLPConfig):
        fields["feed_forward_length"] = feed_forward.ffn_size
    if architecture in GEMMAS:
        fields |= _window_fields(config, architecture)
    if architecture == "gemma2":
        fields["attn_logit_softcapping"] = mixer.softcap
        fields["final_logit_softcapping"] = config.logit_softcap
    return {f"{architecture}.{name}": value for name, value in fields.items()}


def context_length(config: ModelConfig, architecture: str) -> int:
    """Return the longest sequence for which llama.cpp computes the model.

    All its attention but Gemma's is without windows, so a sequence must fit in the shortest one.
    """
    longest = config.max_sequence_length
    if architecture in GEMMAS:
        return longest
    return min([longest, *(size for size in windows_of(config) if size is not None)])


def _problems(config: ModelConfig, mixer: AttentionConfig, architecture: str) -> Iterator[str]:
    """Yield what the architecture has no place for."""
    is_gemma = architecture in GEMMAS
    feed_forward = config.layers[0].feed_forward
    activation, known = (
        getattr(feed_forward, "activation", None),
        "gelu_tanh" if is_gemma else "silu",
    )
    if activation != known:
        yield f"its activation is {activation}, and {architecture} has {known}"
    if architecture in ("qwen3", *GEMMAS) and (mixer.qkv_bias or mixer.out_bias):
        yield f"its attention has biases, and {architecture} has none"
    rope = mixer.rope
    scaling = None if rope is None else rope.scaling
    if scaling is not None and not isinstance(scaling, _SCALINGS[architecture]):
        yield f"{architecture} has no rotary embedding with {type(scaling).__name__}"
    if isinstance(scaling, YarnScaling) and scaling != YarnScaling(
        factor=scaling.factor,
        original_length=scaling.original_length,
        beta_fast=scaling.beta_fast,
        beta_slow=scaling.beta_slow,
    ):
        yield "YaRN has mscale, attention_factor or truncate, and llama.cpp has the usual ones"
    if is_gemma:
        yield from _gemma_problems(config, mixer, architecture)


def _gemma_problems(
    config: ModelConfig, mixer: AttentionConfig, architecture: str
) -> Iterator[str]:
    width = mixer.head_dim
    if config.num_layers == _LARGEST[architecture]:
        width = config.hidden_size // mixer.num_heads
    scale = mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale
    if abs(scale * width**0.5 - 1) > 1e-6:
        yield f"its scores have the factor {scale}, and {architecture} has {width}**-0.5"
    if architecture == "gemma2" and None in (mixer.softcap, config.logit_softcap):
        yield "it lacks a soft cap of scores or of logits, and gemma2 has both"
    if architecture == "gemma3" and config.logit_softcap is not None:
        yield "its logits have a soft cap, and gemma3 has none"
    _, local = whole_and_local(config)
    if local is None:
        yield f"no layer has a window, and {architecture} has layers with one"
    elif window_period(windows_of(config), _PERIOD[architecture]) is None:
        yield "its layers without a window do not follow each other at equal distances"
    scaled = local is not None and local.rope is not None and local.rope.scaling is not None
    if architecture == "gemma3" and scaled:
        yield "its layers with a window have a scaled rotary embedding, and gemma3's have none"


def _rope_fields(config: ModelConfig, mixer: AttentionConfig) -> dict[str, Any]:
    """Return the fields of the rotary embedding of layers without a window."""
    whole, _ = whole_and_local(config)
    rope = (whole or mixer).rope
    if rope is None:
        return {}
    fields = {"rope.dimension_count": mixer.head_dim, "rope.freq_base": rope.theta}
    scaling = rope.scaling
    if isinstance(scaling, LinearScaling | YarnScaling):
        fields["rope.scaling.type"] = scaling.type_name
        fields["rope.scaling.factor"] = scaling.factor
    if isinstance(scaling, YarnScaling):
        fields["rope.scaling.original_context_length"] = scaling.original_length
        fields["rope.scaling.yarn_beta_fast"] = scaling.beta_fast
        fields["rope.scaling.yarn_beta_slow"] = scaling.beta_slow
    return fields


def _window_fields(config: ModelConfig, architecture: str) -> dict[str, Any]:
    """Return the fields of Gemma's layers with a window."""
    _, local = whole_and_local(config)
    if local is None or local.rope is None:
        return {}
    fields = {"attention.sliding_window": local.window, "rope.freq_base_swa": local.rope.theta}
    period = window_period(windows_of(config), _PERIOD[architecture])
    if period != _PERIOD[architecture]:
        fields["attention.sliding_window_pattern"] = period
    return fields
