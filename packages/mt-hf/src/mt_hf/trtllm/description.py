"""A model's description in the config.json of a checkpoint of TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
from mt_model import (
    AttentionConfig,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    YarnScaling,
)

from mt_hf.family.decoder import first_mixer
from mt_hf.family.error import ExchangeError
from mt_hf.family.rope import write_rope
from mt_hf.family.windows import whole_and_local, window_period, windows_of
from mt_hf.trtllm.rank_tensors import GEMMAS
from mt_hf.writing.source import NamedTensors

TRTLLMType: TypeAlias = Literal["f32", "bf16", "f16"]
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
)
ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "gemma2": "Gemma2ForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
    }
)
_SCALINGS = (LinearScaling, DynamicScaling, Llama3Scaling, YarnScaling)
_PERIOD = 6  # of Gemma 3's layers without a window
_RENORMALIZE = 1  # of the weights of the chosen experts


def check_model(tensors: NamedTensors, tp: int, pp: int) -> None:
    """Refuse a model that TensorRT-LLM lacks, and ranks that can't share it."""
    if tensors.family not in ARCHITECTURES:
        raise ExchangeError(
            f"the family {tensors.family} has no mapping to TensorRT-LLM; those of "
            f"{', '.join(ARCHITECTURES)} have one"
        )
    problems = [*_model_problems(tensors), *_rank_problems(tensors, tp, pp)]
    if problems:
        lines = "\n  ".join(problems)
        raise ExchangeError(f"this model can't be a checkpoint of TensorRT-LLM:\n  {lines}")


def _model_problems(tensors: NamedTensors) -> Iterator[str]:
    config, family = tensors.config, tensors.family
    mixer, feed_forward = first_mixer(config), config.layers[0].feed_forward
    activation = getattr(feed_forward, "activation", None)
    usual = "gelu_tanh" if family in GEMMAS else "silu"
    if activation != usual:
        yield f"its activation is {activation}, and {family} has {usual} there"
    if getattr(feed_forward, "bias", False):
        yield "its MLPs have biases, for which TensorRT-LLM has no tensors"
    if family not in ("llama", "qwen2") and (mixer.qkv_bias or mixer.out_bias):
        yield f"its attention has biases, and {family} has none there"
    if family in GEMMAS and not config.tied:
        yield f"its head is its own, and {family} has the embedding there"
    if family == "gemma3_text" and window_period(windows_of(config), _PERIOD) is None:
        yield "its layers without a window do not follow each other at equal distances"
    for layer in config.layers:
        rope = getattr(layer.mixer, "rope", None)
        scaling = None if rope is None else rope.scaling
        if scaling is not None and (family in GEMMAS or not isinstance(scaling, _SCALINGS)):
            yield f"{family} has no rotary embedding with {type(scaling).__name__} there"
            break


def _rank_problems(tensors: NamedTensors, tp: int, pp: int) -> Iterator[str]:
    config, mixer = tensors.config, first_mixer(tensors.config)
    groups, is_gemma = mixer.num_kv_heads, tensors.family in GEMMAS
    if tp < 1 or pp < 1:
        yield f"tp {tp} and pp {pp} must be 1 or more"
        return
    if pp > config.num_layers:
        yield f"pp {pp}: it has {config.num_layers} layers to share"
    if pp > 1 and is_gemma:
        yield f"pp {pp}: TensorRT-LLM has no stages for {tensors.family}; use tp"
    if mixer.num_heads % tp:
        yield f"tp {tp} does not divide the {mixer.num_heads} heads of queries"
    if groups % tp and (tp % groups or (is_gemma and groups > 1)):
        yield f"tp {tp} does not divide the {groups} heads of keys and values"
    if _width(config) % tp:
        yield f"tp {tp} does not divide the width {_width(config)} of the feed-forward"
    if is_gemma and config.vocab_size % tp:
        yield f"tp {tp} does not divide the {config.vocab_size} rows of the embedding"


def _width(config: ModelConfig) -> int:
    feed_forward = config.layers[0].feed_forward
    if isinstance(feed_forward, MoEConfig):
        return feed_forward.width
    return feed_forward.ffn_size if isinstance(feed_forward, MLPConfig) else 0


def config_of(tensors: NamedTensors, kind: TRTLLMType, tp: int, pp: int) -> dict[str, Any]:
    """Return the content of config.json."""
    config, family = tensors.config, tensors.family
    mixer, feed_forward = first_mixer(config), config.layers[0].feed_forward
    whole, _ = whole_and_local(config)
    rope = write_rope((whole or mixer).rope)
    scaling = rope["rope_scaling"]
    if scaling is not None:
        scaling = {"type": scaling["rope_type"], **scaling}
    fields: dict[str, Any] = {
        "architecture": ARCHITECTURES[family],
        "dtype": str(DTYPES[kind]).removeprefix("torch."),
        "logits_dtype": "float32",
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads,
        "head_size": mixer.head_dim,
        "hidden_size": config.hidden_size,
        "intermediate_size": _width(config),
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_sequence_length,
        "norm_epsilon": config.norm.eps,
        "hidden_act": "gelu_pytorch_tanh" if family in GEMMAS else "silu",
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": rope["rope_theta"],
        "rotary_scaling": scaling,
        "attn_bias": mixer.qkv_bias,
        "mlp_bias": False,
        "tie_word_embeddings": config.tied,
        "use_parallel_embedding": family in GEMMAS and tp > 1,
        "embedding_sharding_dim": 0,
        "mapping": {"world_size": tp * pp, "tp_size": tp, "pp_size": pp},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
    }
    if isinstance(feed_forward, MoEConfig):
        experts = {"num_experts": feed_forward.num_experts, "top_k": feed_forward.top_k}
        fields["moe"] = {**experts, "normalization_mode": _RENORMALIZE}
        fields["hidden_act"] = "swiglu"  # experts with two factors
    if family in ("qwen2", "qwen3"):
        fields["qwen_type"] = family
    return fields | (_gemma_fields(config, mixer, family) if family in GEMMAS else {})


def _gemma_fields(config: ModelConfig, mixer: AttentionConfig, family: str) -> dict[str, Any]:
    fields = {
        "inter_layernorms": True,
        "query_pre_attn_scalar": mixer.head_dim if mixer.scale is None else round(mixer.scale**-2),
        "final_logit_softcapping": config.logit_softcap,
    }
    if family == "gemma2":
        return {**fields, "attn_logit_softcapping": mixer.softcap}
    _, local = whole_and_local(config)
    return {
        **fields,
        "_sliding_window_pattern": window_period(windows_of(config), _PERIOD),
        "sliding_window": None if local is None else local.window,
        "rope_local_base_freq": None if local is None or local.rope is None else local.rope.theta,
    }
